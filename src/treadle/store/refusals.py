"""Why the store did not do what it was asked. Each is an answer to the caller, not a fault of the store.

HubError
└── StoreRefusal
    ├── StaleToken      the lease was given to somebody else, or ended
    ├── HeldByAnother   a live holder has this step
    ├── KeyReused       an idempotency key came back with another body
    ├── BatchPruned     the step was trained so long ago that its data is no longer kept
    ├── QueueFull       as many groups wait as may wait
    └── StorageFailed   the database could not be written (a full disk is errors.DiskFull)
        └── DamagedGroups   groups are not as they were written; they were set aside, and asking again helps
"""

from __future__ import annotations

from treadle.errors import HubError


class StoreRefusal(HubError):
    pass


class StaleToken(StoreRefusal):
    pass


class HeldByAnother(StoreRefusal):
    pass


class KeyReused(StoreRefusal):
    pass


class BatchPruned(StoreRefusal):
    pass


class QueueFull(StoreRefusal):
    pass


class StorageFailed(StoreRefusal):
    pass


class DamagedGroups(StorageFailed):
    pass
