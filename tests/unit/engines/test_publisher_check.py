"""PublisherCheck: one run publishes to an engine; which trainers are accepted, and the errors of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from starlette.requests import Request

from treadle.engines.api.context import PublisherCheck
from treadle.errors import EngineError, RequestError
from treadle.sync.gate import PUBLISHER_HEADER, ProcessIdentity, Publisher, this_publisher

HERE = this_publisher(Path("/runs/a"))
ENDED = ProcessIdentity(pid=2**22 + 1, started=1)  # beyond the largest pid of Linux


def asked_by(publisher):
    headers = [] if publisher is None else [(PUBLISHER_HEADER.lower().encode(), publisher.as_header().encode())]
    return Request({"type": "http", "headers": headers})


def changed(**fields):
    return msgspec.structs.replace(HERE, **fields)


def publish(publishers, publisher, **options):
    with publishers.authorize(asked_by(publisher), **options):
        pass


@contextmanager
def other_process():
    """A running trainer of the same run."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
        yield changed(process=ProcessIdentity(pid=process.pid, started=started))
        process.kill()


def test_another_run_is_refused_even_after_the_first_trainer_ended():
    for first in (HERE, changed(process=ENDED), changed(machine="another", process=ENDED)):
        publishers = PublisherCheck()
        publish(publishers, first)
        other = changed(run="/runs/b on x", process=ProcessIdentity(pid=1, started=0))
        with pytest.raises(RequestError, match=r"serves versions of /runs/a on .*, not of /runs/b on x"):
            publish(publishers, other)
        publish(publishers, first)


def test_a_second_trainer_of_a_run_takes_over_when_the_first_ended():
    publishers = PublisherCheck()
    with other_process() as first:
        publish(publishers, first)
        with pytest.raises(RequestError, match=rf"another trainer of .* \(process {first.process.pid}\)"):
            publish(publishers, HERE)
        os.kill(first.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, first.process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        publish(publishers, HERE)
    with pytest.raises(RequestError, match="publishes to this engine now"):
        publish(publishers, first)  # what it had sent before it ended


def test_a_trainer_on_another_machine_can_be_replaced():
    publishers, far = PublisherCheck(), changed(machine="another machine")
    publish(publishers, far)
    publish(publishers, HERE)
    with pytest.raises(RequestError, match="publishes to this engine now"):
        publish(publishers, far)


def test_an_anonymous_request_is_refused_while_a_trainer_publishes():
    publishers = PublisherCheck()
    publish(publishers, None)
    publish(publishers, HERE)
    with pytest.raises(RequestError, match="the trainer of /runs/a on"):
        publish(publishers, None)
    publish(publishers, None, allow_anonymous=True)


def test_after_a_restart_by_hand_any_run_may_publish():
    publishers, other = PublisherCheck(), changed(run="/runs/b", process=ENDED)
    publish(publishers, HERE)
    publishers.reset(asked_by(HERE))  # its own way to publish
    with pytest.raises(RequestError):
        publish(publishers, other)
    publishers.reset(asked_by(None))
    publish(publishers, other)


def test_a_refused_publish_claims_nothing():
    publishers, other = PublisherCheck(), changed(run="/runs/b", process=ENDED)
    with pytest.raises(RequestError, match="does not fit"), publishers.authorize(asked_by(HERE)):
        raise RequestError("it does not fit")
    publish(publishers, other)
    with pytest.raises(EngineError, match="half written"), publishers.authorize(asked_by(other)):
        raise EngineError("half written")
    with pytest.raises(RequestError, match="serves versions of /runs/b"):
        publish(publishers, HERE)


@pytest.mark.parametrize(
    "header",
    ["", "x", "{}", "[" * 10_000, '{"run": 1}', HERE.as_header().replace(str(os.getpid()), "9" * 20)],
    ids=["empty", "no JSON", "nothing", "deep", "another type", "a pid of 20 digits"],
)
def test_an_invalid_header_gives_a_readable_error(header):
    request = Request({"type": "http", "headers": [(PUBLISHER_HEADER.lower().encode(), header.encode())]})
    with pytest.raises(RequestError, match="cannot be read"), PublisherCheck().authorize(request):
        pass


def test_a_path_of_any_characters_fits_into_a_header():
    path = Path("/runs/Größe 数学 \udcff")
    publisher = this_publisher(path)
    assert publisher.as_header().isascii()
    assert "Größe 数学" in publisher.run
    assert isinstance(publisher, Publisher)
