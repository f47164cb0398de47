"""Durable queue: append groups; lease, acknowledge and redeliver batches.

append --> queued --lease--> leased --ack--> trained
             |                 |  ^
             |                 |  +-- nack, or a lease that ran out: the same batch, in the same order
             |                 +--- too many deliveries, or its content rotted --> dead (kept, with the reason)
             +--- stale, or larger than a batch --> dropped (kept, with the reason)
"""

from treadle.store.file import set_aside
from treadle.store.records import (
    Appended,
    Batch,
    BatchPruned,
    Counts,
    DamagedGroups,
    EnvLoad,
    EnvQueue,
    EnvRecord,
    Event,
    Figures,
    Format,
    HeldByAnother,
    KeyReused,
    Lease,
    LeaseTerms,
    Limits,
    NewGroup,
    Plan,
    Post,
    QueueFull,
    ReadFailed,
    RunState,
    StaleToken,
    StorageFailed,
    StoredGroup,
    StoreRefusal,
    Tally,
    Waiting,
)
from treadle.store.sqlite import SqliteStore
from treadle.store.store import Store

__all__ = [
    "Appended",
    "Batch",
    "BatchPruned",
    "Counts",
    "DamagedGroups",
    "EnvLoad",
    "EnvQueue",
    "EnvRecord",
    "Event",
    "Figures",
    "Format",
    "HeldByAnother",
    "KeyReused",
    "Lease",
    "LeaseTerms",
    "Limits",
    "NewGroup",
    "Plan",
    "Post",
    "QueueFull",
    "ReadFailed",
    "RunState",
    "SqliteStore",
    "StaleToken",
    "StorageFailed",
    "Store",
    "StoreRefusal",
    "StoredGroup",
    "Tally",
    "Waiting",
    "set_aside",
]
