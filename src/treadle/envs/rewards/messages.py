"""What the pool and its workers say to each other: msgpack in frames, over a socket. No pickle in either direction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from treadle.envs.rewards.base import RewardInput
from treadle.envs.rewards.outcome import CallResult
from treadle.net.frames import LENGTH

IN_WORKER = "TREADLE_REWARD_WORKER"  # set in the environment of a worker


class Setup(msgspec.Struct, tag="setup"):
    """First of all: where to import from."""

    sys_path: list[str]
    memory_limit_mb: int


class Load(msgspec.Struct, tag="load"):
    """Import a reward and keep it under a key; answered by Loaded."""

    key: int
    config: dict[str, Any]


class Work(msgspec.Struct, tag="work"):
    """Calls of a loaded reward; each is answered by a CallResult as soon as it is done, in order."""

    key: int
    calls: list[msgspec.Raw]  # of each its completions, packed when they came: see pack_inputs


class Loaded(msgspec.Struct, tag="loaded"):
    """The reward is there, or why not."""

    problem: str = ""
    fix: str = ""


Order = Setup | Load | Work
Answer = Loaded | CallResult

ORDERS = msgspec.msgpack.Decoder(Order)
ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


INPUTS = msgspec.msgpack.Decoder(list[RewardInput])


def pack_inputs(inputs: Sequence[RewardInput]) -> msgspec.Raw:
    """What one call is given; TypeError when a data row holds what cannot be sent."""
    return msgspec.Raw(msgspec.msgpack.encode(inputs))


def frame(message: Order | Answer) -> bytes:
    body = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(body)) + body
