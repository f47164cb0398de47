"""Ports stay reserved until a child process has them, and no grandchild keeps one."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from treadle.errors import PortInUse
from treadle.launch.machine import ANY_FREE, held_ports, of_this_machine, port_of
from treadle.launch.placement import LocalPlacement
from treadle.launch.supervisor import StopRequest, Supervisor
from treadle.net.address import take_port
from treadle.net.probe import answers_ok

LOOPBACK = "127.0.0.1"
# A server as ours are: it takes its port by take_port, and starts a child of its own first.
SERVER = """
import subprocess, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from treadle.net.address import take_port
listener = take_port("127.0.0.1", {port})
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], close_fds=False)
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = HTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
server.socket = listener
server.serve_forever()
"""


def can_take(port: int) -> bool:
    try:
        take_port(LOOPBACK, port).close()
    except PortInUse:
        return False
    return True


def test_a_second_run_cannot_have_the_port_that_a_first_one_holds() -> None:
    with held_ports({"hub": (LOOPBACK, ANY_FREE)}) as first:
        port = port_of(first["hub"])
        assert not can_take(port)
        with held_ports({"hub": (LOOPBACK, port)}) as second:
            assert port_of(second["hub"]) not in (port, 0), "a default port gives way"
    assert can_take(port), "let go of at the end"


def test_a_busy_port_that_the_user_chose_is_an_error_that_names_it() -> None:
    with held_ports({"hub": (LOOPBACK, ANY_FREE)}) as held:
        port = port_of(held["hub"])
        with (
            pytest.raises(PortInUse, match=rf"port {port}.*--hub\.port") as caught,
            held_ports({"hub": (LOOPBACK, port)}, frozenset({"hub.port"})),
        ):
            pass
    assert caught.value.exit_code == 2


def test_one_port_chosen_for_two_servers_is_reported_by_both_flags() -> None:
    with held_ports({"hub": (LOOPBACK, ANY_FREE)}) as held:
        port = port_of(held["hub"])
    wished = {"hub": (LOOPBACK, port), "engine": (LOOPBACK, port)}
    words = rf"--hub\.port and --engine\.port are both {port}"
    with pytest.raises(PortInUse, match=words), held_ports(wished, frozenset({"hub.port", "engine.port"})):
        pass
    assert can_take(port)


def test_a_default_port_gives_way_to_one_that_is_chosen_for_another() -> None:
    with held_ports({"hub": (LOOPBACK, ANY_FREE)}) as held:
        port = port_of(held["hub"])
    with held_ports({"hub": (LOOPBACK, port), "engine": (LOOPBACK, port)}, frozenset({"engine.port"})) as taken:
        assert list(taken) == ["hub", "engine"]
        assert port_of(taken["engine"]) == port != port_of(taken["hub"])


def test_a_child_serves_on_the_reserved_socket_and_frees_it_at_its_end(make_spec) -> None:
    with held_ports({"hub": (LOOPBACK, ANY_FREE)}) as listeners:
        port = port_of(listeners["hub"])
        url = f"http://{LOOPBACK}:{port}/healthz"
        with Supervisor(StopRequest(), placement=LocalPlacement(listeners)) as supervisor:
            supervisor.start([make_spec("hub", SERVER.format(port=port), ready_url=url)])
            assert answers_ok(url)
            assert listeners["hub"].fileno() == -1, "only the child has it now"
        assert can_take(port)


def test_a_connection_made_before_the_server_is_up_waits_in_line(make_spec) -> None:
    with held_ports({"hub": (LOOPBACK, ANY_FREE)}) as listeners:
        port = port_of(listeners["hub"])
        early = socket.create_connection((LOOPBACK, port), timeout=20)
        with early, Supervisor(StopRequest(), placement=LocalPlacement(listeners)) as supervisor:
            early.sendall(b"GET / HTTP/1.0\r\n\r\n")
            supervisor.start([make_spec("hub", SERVER.format(port=port), ready_url=f"http://{LOOPBACK}:{port}/")])
            assert early.recv(12) == b"HTTP/1.0 200"


def test_the_launcher_needs_no_web_server_to_hold_a_port(tmp_path: Path) -> None:
    code = "import sys, treadle.launch.machine; print({'uvicorn', 'starlette', 'uvloop'} & set(sys.modules))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert output.stdout.strip() == "set()"


def test_a_port_is_reserved_only_for_a_server_of_this_machine() -> None:
    here, elsewhere = (LOOPBACK, 8000), ("203.0.113.7", 9001)  # an address for documentation
    assert of_this_machine({"hub": here, "engine": elsewhere}) == {"hub": here}
