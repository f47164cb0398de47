"""shared_vllm, one copy: publish by writing where the engine reads.

    pause  ──  the engine freezes between two tokens
    write  ──  the optimizer's last step goes into the live weights, which are the engine's own
    resume ──  it goes on under the new version, without what it had cached

So no token is sampled from half-written weights. The weights stay as they are until the next publish, so the proof is
taken after the engine goes on again: it costs no time of generation.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from treadle.config import TrainConfig
from treadle.config.sync import FIND_BRIDGE_FILE
from treadle.errors import SyncError
from treadle.log import get_logger
from treadle.sync.attaching import choose_folder, refuse_other_dtype
from treadle.sync.bridge_file import find_bridge_file, read_bridge_file
from treadle.sync.engine_link import EngineLink
from treadle.sync.layout import Layout
from treadle.sync.proof import Proof
from treadle.sync.receipt import Attached, Publishable, Receipt
from treadle.wire.bridge import BridgeState, Pause, Resume

log = get_logger("sync")


class SingleCopySync:
    """Publish into memory that the engine serves from."""

    has_one_copy = True

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._engine = EngineLink(config.engine_url, config.publish_deadline_s)
        self._proof = Proof(config, self._engine, compares_weights=True)
        self._served: int | None = None  # the version that the engine was last known to serve
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

    def publish(self, policy: Publishable, version: int) -> Receipt:
        started = time.monotonic()
        state = self._engine.post("/bridge/pause", Pause(mode="keep"), BridgeState)
        if self._served not in (None, state.policy_version):
            self._engine.post("/bridge/resume", Resume(), BridgeState)  # nothing was written: it is not ours to hold
            raise SyncError(
                f"the engine at {self._engine.url} serves version {state.policy_version}, where {self._served} was "
                "published last: it was restarted, or another trainer publishes to it",
                fix="end the other trainer, restart the engine, then treadle run --resume",
            )
        paused = time.monotonic()
        policy.write_live_weights()
        written = time.monotonic()
        state = self._engine.post("/bridge/resume", Resume(policy_version=version), BridgeState)
        self._served = state.policy_version
        verified = self._proof.verify(policy, version, state.policy_version)
        return Receipt(
            version=version,
            wait_s=paused - started,
            write_s=written - paused,
            num_bytes=self._num_bytes(policy),
            verified=verified,
        )

    def _num_bytes(self, policy: Publishable) -> int:
        return 0  # the engine reads the trainer's own
