"""Parts of the vLLM engine that need no vLLM: child_guard, server process, messages, adapter registry, change queue."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.e2e.processes import free_port
from treadle.engines.interface import Adapter, Request, find_loaded_adapter
from treadle.engines.sampling import SamplingParams
from treadle.engines.vllm import child_guard
from treadle.engines.vllm.adapters import AdapterRegistry
from treadle.engines.vllm.command import ServerCommand, ServerResources
from treadle.engines.vllm.completions import VllmChoice, VllmOutput, build_vllm_request, to_deltas, to_result
from treadle.engines.vllm.request_flow import ChangeQueue
from treadle.engines.vllm.server_process import ServerProcess
from treadle.errors import EngineError, RequestError

# A server with a child of its own, which says who both are and would sleep for ever.
SERVER = """
import subprocess, sys, os, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def guarded(scratch):
    scratch.mkdir()
    return [sys.executable, "-I", child_guard.__file__, str(scratch), sys.executable, "-c", SERVER]


def wait_until(condition, deadline_s=10.0):
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def is_alive(pid):
    """A zombie counts as gone."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(pids):
    wait_until(lambda: not any(map(is_alive, pids)))


def test_the_process_group_ends_when_stdin_closes(tmp_path):
    process = subprocess.Popen(guarded(tmp_path / "scratch"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = [int(word) for word in process.stdout.readline().split()]
    assert all(psutil.pid_exists(pid) for pid in pids)
    process.stdin.close()
    process.wait(timeout=10)
    wait_until_gone(pids)


def test_the_process_group_and_scratch_end_with_a_killed_engine(tmp_path):
    argv = guarded(tmp_path / "scratch")
    owner = f"import subprocess, sys, time; p = subprocess.Popen({argv!r}, stdin=subprocess.PIPE); time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE)
    pids = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait(timeout=10)
    wait_until_gone(pids)
    wait_until(lambda: not (tmp_path / "scratch").exists())


def test_leftovers_of_a_dead_server_end_and_its_exit_code_is_kept(tmp_path):
    process = subprocess.Popen(guarded(tmp_path / "scratch"), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = [int(word) for word in process.stdout.readline().split()]
    os.kill(pids[0], signal.SIGKILL)
    assert process.wait(timeout=10) == 128 + signal.SIGKILL
    wait_until_gone(pids)


# One that never gets ready, and takes no notice of being asked to end.
DEAF_SERVER = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""


def test_a_stop_during_the_start_ends_the_wait_at_once(tmp_path, capfd):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    place = ServerResources(port=free_port(), api_key="k", scratch=scratch, cache=tmp_path)
    server = ServerProcess(ServerCommand((sys.executable, "-c", DEAF_SERVER), os.environ), place)
    output = ""

    def has_said_its_pid():
        nonlocal output
        output += capfd.readouterr().err
        return "vllm | pid " in output and output.endswith("\n")

    wait_until(has_said_its_pid)
    pid = int(output.rsplit(maxsplit=1)[-1])
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(server.wait_until_ready, 600)
        stopping = pool.submit(server.stop)
        with pytest.raises(EngineError, match="stopped while it started"):
            waiting.result(child_guard.GRACE_S)
        assert not stopping.done()  # it is given its time
        stopping.result(30)
    assert server.exit_reason() is not None
    wait_until_gone([pid])
    assert not scratch.exists()


# Healthy, and its first token takes a second: it compiles something.
SLOW_SERVER = """
import http.server, sys, time
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer()
    def do_POST(self):
        time.sleep(1.0)
        self.answer()
    def answer(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.mark.parametrize(("timeout_s", "is_long_enough"), [(60.0, True), (0.2, False)])
def test_the_first_token_may_use_the_rest_of_the_start_timeout(tmp_path, monkeypatch, timeout_s, is_long_enough):
    monkeypatch.setattr("treadle.engines.vllm.server_process.FIRST_TOKEN_S", 0.2)
    (tmp_path / "scratch").mkdir()
    place = ServerResources(port=free_port(), api_key="k", scratch=tmp_path / "scratch", cache=tmp_path)
    server = ServerProcess(ServerCommand((sys.executable, "-c", SLOW_SERVER, str(place.port)), os.environ), place)
    wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", place.port)) == 0)
    if is_long_enough:
        server.wait_until_ready(timeout_s)
    else:
        with pytest.raises(EngineError, match="its first token did not come within 0 s") as refused:
            server.wait_until_ready(timeout_s)
        assert "see in its log" in refused.value.fix
    server.stop()


# Its bars as a GPU's vLLM draws them: shards in lines, graphs again and again in one.
SERVER_WITH_BARS = """
import sys, time
for done in range(3):
    print(f"(EngineCore pid=7) Loading safetensors checkpoint shards: {50 * done:3}% Completed | {done}/2 [00:00<?]")
for done in range(3):
    sys.stdout.write(f"\\rCapturing CUDA graphs (FULL): {50 * done:3}%|##   | {done}/2 [00:00<00:01,  6.11it/s]")
print()
print("ready", flush=True)
time.sleep(600)
"""


def test_start_progress_is_reported_and_logged_once_per_bar(tmp_path, capfd):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    place = ServerResources(port=free_port(), api_key="k", scratch=scratch, cache=tmp_path)
    progress, output = [], ""

    def is_ready():
        nonlocal output
        output += capfd.readouterr().err
        return "vllm | ready" in output

    server = ServerProcess(
        ServerCommand((sys.executable, "-c", SERVER_WITH_BARS), os.environ), place, lambda *bar: progress.append(bar)
    )
    try:
        wait_until(is_ready)
    finally:
        server.stop()
    shards, graphs = "loading safetensors checkpoint shards", "capturing CUDA graphs (FULL)"
    assert progress == [(what, done, 2) for what in (shards, graphs) for done in range(3)]
    assert [line.count("100%") for line in output.splitlines() if "%" in line] == [1, 1]


def request(**changes):
    given = {"prompt_ids": [5, 6], "n": 2, "max_tokens": 4, "sampling": SamplingParams()} | changes
    return Request(**given)


def sampling(asked):
    return ordered(asked).sampling


def ordered(asked, *, stream=False):
    return build_vllm_request(asked, model="policy", eos_ids=frozenset({1}), cache_salt="v3", stream=stream)


def no_text(_prompt, _token_ids):
    raise AssertionError("its text came with it")


def test_every_sampling_field_is_set():
    output = ordered(
        request(sampling=SamplingParams(0.5, 0.9, 7, 0.1), stop=("x",), stop_ids=frozenset({9}), seed=2**64 - 1)
    )
    expected = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.0, "n": 2}
    assert output.sampling.items() >= expected.items()
    assert output.sampling["stop"] == ["x"]
    assert output.sampling["stop_token_ids"] == [1, 9]
    assert 0 <= output.sampling["seed"] < 2**63
    assert (output.prompt_ids, output.cache_salt) == ([5, 6], "v3")
    assert sampling(request(ignore_eos=True, stop_ids=frozenset({9})))["stop_token_ids"] == [9]


def test_vllm_detokenizes_only_for_streams_and_stop_strings():
    assert not sampling(request())["detokenize"]
    assert sampling(request(stop=("x",)))["detokenize"]
    assert ordered(request(), stream=True).sampling["detokenize"]


def test_a_greedy_completion_is_generated_once_and_copied():
    asked = request(n=3, sampling=SamplingParams(temperature=0))
    assert sampling(asked)["n"] == 1
    answer = VllmOutput([VllmChoice(0, [7, 8], [-0.5, -1.0], text="ab", finish_reason="length")])
    generation = to_result(answer, asked, [4], 0.1, no_text)
    assert [c.token_ids for c in generation.completions] == [[7, 8]] * 3
    assert [c.policy_versions for c in generation.completions] == [[4]] * 3
    assert [d.index for d in to_deltas(answer, asked, 4)] == [0, 1, 2]


def test_outputs_are_ordered_by_index_and_decoded_if_needed():
    choices = [VllmChoice(1, [8], [-2.0], [{3: -0.1}], finish_reason="length"), VllmChoice(0, [9], [-1.0], text="a")]
    answer = VllmOutput(choices, prompt_tops=[{}, {6: -3.0}])
    written = to_result(answer, request(num_top=1), [0, 1], 0.1, lambda *given: f"{given}")
    assert [c.text for c in written.completions] == ["a", "([5, 6], [8])"]
    assert written.completions[1].tops == [{3: -0.1}]
    assert written.prompt_tops == [{}, {6: -3.0}]
    assert written.completions[1].policy_versions == [0, 1]


def test_the_token_that_ends_a_completion_is_not_in_its_text():
    ended, cut_off = VllmChoice(0, [7, 8], finish_reason="stop"), VllmChoice(1, [7, 8], finish_reason="length")
    generation = to_result(VllmOutput([ended, cut_off]), request(), [0], 0.1, lambda _, token_ids: f"{token_ids}")
    assert [c.text for c in generation.completions] == ["[7]", "[7, 8]"]
    assert [c.token_ids for c in generation.completions] == [[7, 8]] * 2


def test_a_character_that_was_cut_off_is_not_in_the_text():
    cut_off = VllmChoice(0, [7, 8], finish_reason="length")
    generation = to_result(VllmOutput([cut_off]), request(n=1), [0], 0.1, lambda *_: "a\ufffd")
    assert [c.text for c in generation.completions] == ["a"]


def adapter(name, version):
    return Adapter(name=name, path=Path("/a") / name, rank=4, policy_version=version)


def test_a_retired_adapter_is_unused_after_its_last_request():
    registry = AdapterRegistry()
    first, second = registry.next_name("v1"), registry.next_name("v2")
    assert registry.acquire(None) is None
    registry.add(adapter("v1", 1), first)
    used, served = registry.acquire(None)
    assert (used.policy_version, served) == (1, first)
    registry.add(adapter("v2", 2), second)
    assert [a.name for a in registry.loaded()] == ["v1", "v2"]
    assert registry.acquire(None)[1] == second
    registry.remove("v1")
    assert [a.name for a in registry.loaded()] == ["v2"]
    assert registry.unused() == []
    assert registry.release(first) is True
    assert registry.unused() == [first]
    registry.discard(first)
    assert registry.unused() == []


def test_a_reused_adapter_name_is_new_to_vllm():
    registry = AdapterRegistry()
    first = registry.next_name("mine")
    registry.add(adapter("mine", None), first)
    assert registry.acquire(None) is None  # loaded by hand, it serves only those who name it
    registry.remove("mine")
    second = registry.next_name("mine")
    registry.add(adapter("mine", None), second)
    assert first != second
    assert registry.unused() == [first]
    assert registry.acquire("mine")[1] == second


def test_a_repeated_load_is_idempotent_and_a_name_clash_refused():
    registry = AdapterRegistry()
    registry.add(adapter("mine", 1), registry.next_name("mine"))
    assert find_loaded_adapter(registry.loaded(), "mine", Path("/a/mine"), 1) == adapter("mine", 1)
    assert find_loaded_adapter(registry.loaded(), "other", Path("/a/other"), 1) is None
    with pytest.raises(RequestError, match="choose a new name"):
        find_loaded_adapter(registry.loaded(), "mine", Path("/a/other"), 1)


def test_unloading_the_serving_adapter_restores_the_base_model():
    registry = AdapterRegistry()
    name = registry.next_name("v1")
    registry.add(adapter("v1", 1), name)
    registry.remove("v1")
    assert registry.serving is None
    assert registry.unused() == [name]
    with pytest.raises(RequestError, match="no adapter 'v1'"):
        registry.remove("v1")


def test_a_change_that_fails_after_its_client_left_is_logged(caplog):
    async def scenario():
        may_fail = asyncio.Event()

        async def change():
            await may_fail.wait()
            raise EngineError("the server is gone")

        line, strays = ChangeQueue(), []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: strays.append(context))
        asking = asyncio.ensure_future(line.run(change))
        await asyncio.sleep(0.01)
        asking.cancel()
        may_fail.set()
        await line.wait_until_idle(1.0)
        await asyncio.sleep(0)
        gc.collect()
        return strays

    assert asyncio.run(scenario()) == []
    assert [record.message for record in caplog.records] == ["change_failed"]
