"""shared_vllm, one copy: publish by writing where the engine reads.

    adopt  ──  the engine comes to its gate (gate.py) and stands still there, between two tokens
    write  ──  the optimizer's last step goes into the live weights, which are the engine's own
    go on  ──  it goes on under the new version, without what it had cached

So no token is sampled from half-written weights. The weights stay as they are until the next publish, so the proof is
taken after the engine goes on again, and looked at before the next one (proof.py).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from treadle.config import TrainConfig
from treadle.config.sync import FIND_BRIDGE_FILE
from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.sync.attaching import choose_folder, refuse_other_dtype
from treadle.sync.background import in_background
from treadle.sync.bridge_file import find_bridge_file, read_bridge_file
from treadle.sync.engine_link import EngineLink
from treadle.sync.gate import Gate, new_number
from treadle.sync.layout import Layout
from treadle.sync.proof import Proof
from treadle.sync.receipt import Attached, Publishable, Receipt
from treadle.wire.bridge import Adopt, BridgeState

log = get_logger("sync")


@dataclass(frozen=True)
class Adopted:
    """What the engine said when it went on, and when the trainer began and ended to write."""

    state: BridgeState
    still_at: float
    written_at: float


class SingleCopySync:
    """Publish into memory that the engine serves from."""

    has_one_copy = True

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._engine = EngineLink.of_trainer(config)
        self._proof = Proof(config, self._engine)
        self._served: int | None = None  # the version that the engine was last known to serve
        self._gate: Gate | None = None  # None: not attached yet
        if config.vllm_restart_interval not in (None, 1):
            log.info("interval_without_effect", reason="in shared_vllm every step is published")

    def attach(self) -> Attached:
        layout = self.fetch_layout()
        refuse_other_dtype(self._config, layout.dtype)
        folder = choose_folder(self._config, Path(layout.model))
        return Attached(folder=folder, dtype=layout.dtype, layout=layout, has_one_copy=self.has_one_copy)

    def fetch_layout(self) -> Layout:
        """Where the engine's weights are; waits for an engine that is still loading a large model.

        A file that was named must say the same. It alone would not do: what the bytes are now, which version and
        whether half written, only the engine knows.
        """
        layout = self._engine.wait_for("/bridge/state_dict_info", Layout)
        file = self._bridge_file()
        if file is not None:
            self._refuse_other_weights(file, layout)
        self._served = layout.policy_version
        self._gate = Gate(Path(layout.gate))
        return layout

    def _bridge_file(self) -> Path | None:
        wished = self._config.vllm_config_path
        return find_bridge_file(os.environ, Path.cwd()) if wished == FIND_BRIDGE_FILE else wished

    def _refuse_other_weights(self, file: Path, served: Layout) -> None:
        if read_bridge_file(file) != msgspec.structs.replace(served, policy_version=None, is_held=False):
            raise SyncError(
                f"{file} names other weights than the engine at {self._engine.url} serves",
                fix="give the file and the --engine-url (--vllm-port) of one engine, or leave --vllm-config-path out",
            )

    def settle(self) -> None:
        self._proof.settle()

    def publish(self, policy: Publishable, version: int) -> Receipt:
        self._proof.settle()
        started = time.monotonic()
        adopted = self._let_adopt(policy, version)
        self._served = adopted.state.policy_version
        verified = self._proof.verify(policy, version, self._served)
        return Receipt(
            version=version,
            wait_s=adopted.still_at - started,
            write_s=adopted.written_at - adopted.still_at,
            hold_s=adopted.state.held_s,
            num_bytes=self._num_bytes(policy),
            verified=verified,
        )

    def _let_adopt(self, policy: Publishable, version: int) -> Adopted:
        gate = self._gate
        if gate is None:
            raise SyncError("nothing was attached to publish to", fix="attach first")
        number, timeout_s = new_number(), self._config.publish_deadline_s
        order = Adopt(
            policy_version=version, number=number, gate=gate.inode, after_version=self._served, timeout_s=timeout_s
        )
        with gate.publishing():
            adopting = in_background("adopting", lambda: self._engine.post("/bridge/adopt", order, BridgeState))
            if not gate.wait_until_still(number, is_over=adopting.done):
                adopting.result()  # why it does not come to its gate
                raise SyncError(
                    f"the engine at {self._engine.url} says that it adopted version {version} before it was written",
                    fix="use an engine of the same release",
                )
            still_at = time.monotonic()
            policy.write_live_weights()
            written_at = time.monotonic()
            gate.go_on(number)
            return Adopted(adopting.result(), still_at, written_at)

    def _num_bytes(self, policy: Publishable) -> int:
        return 0  # the engine reads the trainer's own
