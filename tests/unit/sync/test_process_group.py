"""Broadcasts between two real processes by Gloo, and their failures."""

from __future__ import annotations

import math
import os
import signal
import socket
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.processes import free_port
from tests.unit.sync.group_peer import SHAPES, Weights, peer, random_weights
from treadle.background import in_background
from treadle.errors import SyncError
from treadle.sync.broadcaster import Receiver, WeightBroadcaster
from treadle.sync.process_group import Bucket, BucketSlice, PeerLost, host_store, local_address_towards, plan_buckets
from treadle.sync.protocol import EngineLink
from treadle.wire.bridge import Received, ReceiveWeights

WEIGHT_SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12)


def test_weights_lie_end_to_end_and_a_large_one_goes_over_several_buckets():
    plan = plan_buckets([("a", (3,)), ("b", (2, 4)), ("c", ())], elements_per_bucket=5)
    assert plan == (
        Bucket(5, (BucketSlice("a", 0, 3, 0), BucketSlice("b", 0, 2, 3))),
        Bucket(5, (BucketSlice("b", 2, 7, 0),)),
        Bucket(2, (BucketSlice("b", 7, 8, 0), BucketSlice("c", 0, 1, 1))),
    )


def test_nothing_needs_no_bucket():
    assert plan_buckets([], elements_per_bucket=5) == ()
    assert plan_buckets([("empty", (0, 3))], elements_per_bucket=5) == ()


@given(WEIGHT_SHAPES, st.integers(1, 40))
def test_each_element_is_sent_once_and_only_the_last_bucket_is_short(shapes, size):
    weights = [(f"w{number}", shape) for number, shape in enumerate(shapes)]
    plan = plan_buckets(weights, size)
    travelled = [(p.name, e) for bucket in plan for p in bucket.slices for e in range(p.start, p.stop)]
    assert travelled == [(name, e) for name, shape in weights for e in range(math.prod(shape))]
    assert all(bucket.num_elements == size for bucket in plan[:-1])
    for bucket in plan:
        offsets = [i for p in bucket.slices for i in range(p.offset, p.offset + p.stop - p.start)]
        assert offsets == list(range(bucket.num_elements))
        assert 0 < bucket.num_elements <= size


SOON_S = 10.0  # for what must not take a deadline


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with peer(tmp_path_factory.mktemp("peer")) as running:
        yield running


@contextmanager
def stopped(engine):
    """Stop the engine process while the test runs."""
    os.kill(engine.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(engine.process.pid, signal.SIGCONT)


def link_to(url, *, timeout_s=30.0, bucket_bytes=16 << 10, host="", port=0):
    return WeightBroadcaster(
        [Receiver(EngineLink(url, timeout_s))],
        "gloo",
        host=host,
        port=port,
        timeout_s=timeout_s,
        bucket_bytes=bucket_bytes,
    )


def equal_bits(one, other):
    return all(torch.equal(w.view(torch.int16), other[name].view(torch.int16)) for name, w in one.items())


def test_weights_arrive_exactly_and_a_trainer_can_join_again(engine):
    link = link_to(engine.url)
    for seed in (1, 2):
        published = random_weights(seed)
        published["norm"][0] = float("nan")  # a NaN's bits, a negative zero: all must come as they are
        published["norm"][1] = -0.0
        if not link.is_joined:
            link.join(Weights(published))
        assert link.send(Weights(published)) == sum(w.nbytes for w in published.values())
        assert equal_bits(engine.weights(), published)
    port = free_port()
    again = link_to(engine.url, bucket_bytes=1 << 20, port=port)  # all in one bucket
    again.join(Weights(random_weights(3)))
    assert again._store.port == port, "as MASTER_PORT says"
    again.send(Weights(random_weights(3)))
    assert equal_bits(engine.weights(), random_weights(3))
    with pytest.raises(SyncError, match="this engine is in no group with this trainer"):
        link.send(Weights(random_weights(4)))
    assert equal_bits(engine.weights(), random_weights(3))


MISFITS = {
    "another shape": ({"up": (70, 91)}, torch.bfloat16, r"up is \[70, 91\] at the trainer and \[70, 90\] in this"),
    "one too many": ({"gate": (3,)}, torch.bfloat16, "the trainer has gate, which this engine's model does not have"),
    "another format": ({}, torch.float32, "embed is float32 at the trainer and bfloat16 in this engine"),
}


@pytest.mark.parametrize(("shapes", "dtype", "words"), MISFITS.values(), ids=MISFITS)
def test_weights_that_are_not_the_engines_are_refused_by_name_at_once(engine, shapes, dtype, words):
    started = time.monotonic()
    with pytest.raises(SyncError, match=words):
        link_to(engine.url).join(Weights(random_weights(1, dtype, SHAPES | shapes)))
    fewer = {name: weight for name, weight in random_weights(1).items() if name != "bias"}
    with pytest.raises(SyncError, match="this engine has bias, which the trainer does not publish"):
        link_to(engine.url).join(Weights(fewer))
    assert time.monotonic() - started < SOON_S
    link = link_to(engine.url)
    link.join(Weights(random_weights(1)))  # it is none the worse for it
    link.send(Weights(random_weights(1)))


def test_an_engine_that_dies_in_the_middle_ends_the_broadcast_at_once(tmp_path):
    with peer(tmp_path) as mortal:
        link = link_to(mortal.url)
        link.join(Weights(random_weights(1)))
        os.kill(mortal.process.pid, signal.SIGSTOP)
        threading.Timer(1.0, mortal.process.kill).start()
        started = time.monotonic()
        with pytest.raises(SyncError, match=f"the engine at {mortal.url} ended during POST /bridge/receive") as error:
            link.send(Weights(random_weights(2)))
        assert "treadle run --resume" in error.value.fix
        assert 0.9 < time.monotonic() - started < SOON_S


def test_a_hanging_engine_ends_the_broadcast_at_the_deadline(engine):
    link = link_to(engine.url, timeout_s=2.0)
    link.join(Weights(random_weights(1)))
    started = time.monotonic()
    late = f"the engine at {engine.url} did not answer POST /bridge/receive within 2 s"
    with stopped(engine), pytest.raises(SyncError, match=late):
        link.send(Weights(random_weights(2)))
    assert 1.9 < time.monotonic() - started < SOON_S


def test_an_engine_that_never_joins_ends_in_an_error_at_the_deadline(engine):
    started = time.monotonic()
    late = f"the engine at {engine.url} did not answer POST /bridge/join within 2 s"
    with stopped(engine), pytest.raises(SyncError, match=late):
        link_to(engine.url, timeout_s=2.0).join(Weights(random_weights(1)))
    assert 1.9 < time.monotonic() - started < SOON_S


def test_a_missing_trainer_is_an_error_of_the_engine_at_the_deadline(engine):
    store = host_store("127.0.0.1", 30.0)  # it listens, and nobody comes to the meeting
    body = {
        "group": "a", "host": "127.0.0.1", "port": store.port, "backend": "gloo", "dtype": "bfloat16", "timeout_s": 2.0,
        "weights": [(name, list(shape)) for name, shape in SHAPES.items()], "bucket_bytes": 1 << 20,
    }  # fmt: skip
    started = time.monotonic()
    answer = httpx.post(f"{engine.url}/bridge/join", json=body, timeout=30)
    assert answer.status_code == 503
    assert "no gloo group with the trainer at 127.0.0.1" in answer.json()["error"]
    assert 1.9 < time.monotonic() - started < SOON_S
    started = time.monotonic()
    nobody = body | {"port": free_port(), "timeout_s": 20.0}
    refused = httpx.post(f"{engine.url}/bridge/join", json=nobody, timeout=30)
    assert "cannot reach 127.0.0.1" in refused.json()["error"]
    assert "--broadcast-host" in refused.json()["error"]
    assert time.monotonic() - started < 15.0


def test_the_store_listens_on_the_engines_network_alone(engine):
    port = int(engine.url.rpartition(":")[2])
    assert local_address_towards("127.0.0.1", port) == "127.0.0.1"
    store = host_store("127.0.0.1", 5.0)
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", store.port), timeout=2)
    with pytest.raises(SyncError, match=r"cannot listen on 192\.0\.2\.1") as error:
        link_to(engine.url, host="192.0.2.1").join(Weights(random_weights(1)))
    assert "--broadcast-host" in error.value.fix


def split_link(url, *, timeout_s=30.0, bucket_bytes=1 << 10):
    """Buckets of 512 elements: most of them begin and end within a row of a weight."""
    return WeightBroadcaster(
        [Receiver(EngineLink(url, timeout_s), 2)], "gloo", timeout_s=timeout_s, bucket_bytes=bucket_bytes
    )


def test_two_workers_copy_their_parts_out_of_one_broadcast(tmp_path):
    with peer(tmp_path, "split") as engine:
        link = split_link(engine.url)
        link.join(Weights(random_weights(1)))
        for seed in (1, 2):
            published = random_weights(seed)
            published["down"][0, 34:36] = torch.tensor([float("nan"), -0.0])
            assert link.send(Weights(published)) == sum(w.nbytes for w in published.values())
            assert equal_bits(engine.weights(), published)
        with pytest.raises(SyncError, match="has 2 ranks, and this process would be rank 2"):
            link_to(engine.url).join(Weights(published))


def test_a_worker_that_hangs_is_named_at_the_deadline(tmp_path):
    with peer(tmp_path, "split") as engine:
        link = split_link(engine.url, timeout_s=2.0)
        link.join(Weights(random_weights(1)))
        httpx.post(f"{engine.url}/silence", timeout=30)
        for call, route in ((link.send, "receive"), (link.join, "join")):
            started = time.monotonic()
            with pytest.raises(SyncError, match=r"\(worker 1 of 2 of the engine did not report\)") as error:
                call(Weights(random_weights(2)))
            assert f"POST /bridge/{route}" in error.value.message
            assert 1.9 < time.monotonic() - started < SOON_S


def test_a_send_that_failed_ends_after_the_engines_part_of_it():
    """Otherwise a reload could be requested while the engine still works on the broadcast."""
    steps = []

    class Engine(BaseHTTPRequestHandler):
        def do_POST(self):
            time.sleep(0.5)
            steps.append("the engine has ended")
            self.send_error(400)

    def send():
        steps.append("the send has failed")
        raise PeerLost("the connection is closed")

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        engine = EngineLink(f"http://127.0.0.1:{server.server_port}", timeout_s=60.0)
        link = WeightBroadcaster([Receiver(engine)], "gloo", host="127.0.0.1", timeout_s=60.0)
        body = ReceiveWeights(group="g", timeout_s=60.0)
        with pytest.raises(SyncError):
            link._all("/bridge/receive", [body], Received, in_background("send", send), lambda: None)
    assert steps == ["the send has failed", "the engine has ended"]
