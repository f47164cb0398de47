"""One of several ranks that broadcast to an engine: python publishing_rank.py ENGINE_URL FOLDER DEVICE BACKEND

Publishes the starting weights and two changed versions, each verified; rank 0 writes published.json into FOLDER.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from treadle.config import TrainConfig
from treadle.sync.shared_vllm import BroadcastSync
from treadle.train.optimizers import build_optimizer
from treadle.train.policy import build_policy
from treadle.train.publishing import publish_with_ranks
from treadle.train.ranks import join_ranks
from treadle.train.sharding import own_part


def main(url, folder, device, backend):
    config = TrainConfig(
        device=device, engine_url=url, use_shared_memory=True, verify_publish="always", publish_timeout_s=60.0,
        broadcast_by=backend, ranks_timeout_s=60.0, compile="off",
    )  # fmt: skip
    ranks = join_ranks(config)
    sync = BroadcastSync(config)
    policy = build_policy(sync.attach(), config, ranks)
    optimizer = build_optimizer(policy, config)
    published = []
    for version in range(3):
        if version:
            with torch.no_grad():
                for master in optimizer.masters.values():
                    own_part(master).add_(0.02)
        receipt = publish_with_ranks(sync.publish, policy, version)
        published.append(
            {"version": receipt.version, "num_bytes": receipt.num_bytes, "write_s": receipt.write_s,
             "canary_mean": receipt.verified.canary_mean}
        )  # fmt: skip
    if ranks.leads:
        (Path(folder) / "published.json").write_text(json.dumps(published))
    ranks.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
