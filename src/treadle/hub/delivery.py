"""How batches go out: the stored bytes as they are, in JSON for everyone, in binary for who asks for it."""

from __future__ import annotations

import asyncio

import msgspec

from treadle.hub.batching import freshness
from treadle.store import Batch, Format, StoredGroup
from treadle.wire import binary
from treadle.wire.groups import ATROPOS_KEYS


async def as_json(format: Format, payload: bytes) -> bytes:
    """A group with Atropos' keys. Only a group of ours that goes to a client of Atropos' has to be written anew."""
    return payload if format == "json" else await asyncio.to_thread(_rewritten, payload)


def _rewritten(packed: bytes) -> bytes:
    group = binary.unpack_group(packed)
    return msgspec.json.encode({key: getattr(group, key) for key in ATROPOS_KEYS})


async def lease_json(batch: Batch, lease_s: float, max_age: int | None) -> bytes:
    """A LeaseAnswer written around the stored bytes.

    To decode a large batch only to encode it again would hold up every other request for as long.
    """
    head = b'{"batch":{"step":%d,"token":"%s","lease_s":%s,"groups":[' % (
        batch.step,
        batch.token.encode(),
        msgspec.json.encode(lease_s),
    )
    groups = [await _group_json(group, _weight(group, batch.step, max_age)) for group in batch.groups]
    return head + b",".join(groups) + b']},"reason":""}'


async def _group_json(group: StoredGroup, weight: float) -> bytes:
    ours = (
        msgspec.json.encode(group.policy_version),
        msgspec.json.encode(group.item),
        group.metrics or b"null",
        msgspec.json.encode(weight),
    )
    payload = await as_json(group.format, group.payload)
    return payload[:-1] + b',"policy_version":%s,"item":%s,"metrics":%s,"weight":%s}' % ours


def lease_binary(batch: Batch, lease_s: float, max_age: int | None) -> bytes:
    stored = [
        binary.StoredForm(
            json=group.payload if group.format == "json" else None,
            binary=group.payload if group.format == "binary" else None,
            policy_version=group.policy_version,
            item=group.item,
            metrics=group.metrics,
            weight=_weight(group, batch.step, max_age),
        )
        for group in batch.groups
    ]
    packed = binary.BinaryBatch(step=batch.step, token=batch.token, lease_s=lease_s, groups=stored)
    return binary.pack_answer(binary.BinaryAnswer(batch=packed))


def _weight(group: StoredGroup, step: int, max_age: int | None) -> float:
    """The trainer of step s is at version s - 1."""
    age = None if group.policy_version is None else step - 1 - group.policy_version
    return freshness(age, max_age)
