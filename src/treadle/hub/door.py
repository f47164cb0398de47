"""The door: a posted group is checked here, once. What passes can be stored, sent on and trained.

Pure: bytes and rules in, groups out. Porters run it in processes of their own.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from treadle.hub.binary_groups import read_packed_groups
from treadle.hub.checks import Rules
from treadle.hub.inflate import inflate
from treadle.hub.json_groups import read_group, read_groups
from treadle.store.records import NewGroup

READERS = {"group": read_group, "groups": read_groups, "binary": read_packed_groups}


class Order(msgspec.Struct, kw_only=True):
    """How to read a body."""

    kind: Literal["group", "groups", "binary"]
    rules: Rules
    is_gzip: bool = False
    with_hash: bool = False
    max_bytes: int = 64 * 2**20
    max_cpu_s: float = 20.0


class Admitted(msgspec.Struct, kw_only=True):
    groups: list[NewGroup]
    body_hash: bytes = b""  # of the inflated body: a client that compresses again may get other bytes


def admit(body: bytes | bytearray, order: Order) -> Admitted:
    """The groups of a body, checked; raises `Refused`. One bad group refuses the whole body: it is stored whole or
    not at all."""
    plain = inflate(body, order.max_bytes) if order.is_gzip else body
    body_hash = hashlib.sha256(plain).digest() if order.with_hash else b""
    return Admitted(groups=READERS[order.kind](plain, order.rules), body_hash=body_hash)
