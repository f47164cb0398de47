"""The durable queue: groups come in, batches are leased, acknowledged, and can be given out again.

append --> queued --lease--> leased --ack--> trained
                               |  ^
                               |  +-- nack, or a lease that ran out: the same batch, in the same order
                               +--- too many deliveries --> dead (kept, with the reason)
"""

from treadle.store.records import (
    Appended,
    Batch,
    Choose,
    Counts,
    DeadGroup,
    EnvLoad,
    EnvRecord,
    LeaseTerms,
    NewGroup,
    Post,
    RunState,
    StoredGroup,
    Waiting,
)
from treadle.store.refusals import (
    HeldByAnother,
    KeyReused,
    QueueFull,
    StaleToken,
    StorageFailed,
    StoreRefusal,
)
from treadle.store.sqlite import Store

__all__ = [
    "Appended",
    "Batch",
    "Choose",
    "Counts",
    "DeadGroup",
    "EnvLoad",
    "EnvRecord",
    "HeldByAnother",
    "KeyReused",
    "LeaseTerms",
    "NewGroup",
    "Post",
    "QueueFull",
    "RunState",
    "StaleToken",
    "StorageFailed",
    "Store",
    "StoreRefusal",
    "StoredGroup",
    "Waiting",
]
