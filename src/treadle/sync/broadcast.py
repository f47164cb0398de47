"""shared_vllm with --use-shared-memory, two copies: the trainer has its own, and hands over what it published.

All weights go through one file in memory, laid end to end, while the engine is held; an engine on a GPU copies them
from there, one on a CPU serves from there. Each call has a deadline, so an engine that hangs ends in an error.
"""

from __future__ import annotations

from treadle.errors import ConfigError
from treadle.sync.receipt import Attached, Publishable
from treadle.sync.single_copy import SingleCopySync


class BroadcastSync(SingleCopySync):
    """The same calls as with one copy; only the trainer's weights are elsewhere between two publishes."""

    has_one_copy = False

    def attach(self) -> Attached:
        if not self._engine.is_on_this_machine:
            raise ConfigError(
                f"the engine at {self._engine.url} is on another machine: --use-shared-memory hands weights over "
                "through this one's memory, and a broadcast by NCCL between several GPUs or machines is not there yet",
                fix="set --weight-bridge-mode reload, with --live-path on a disk that both machines see",
            )
        return super().attach()

    def _num_bytes(self, policy: Publishable) -> int:
        return sum(weight.nbytes for _, weight in policy.served_weights())
