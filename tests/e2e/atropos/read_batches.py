"""The trainer's side on the real example_trainer: register, read, note each batch and what its tensors look like.

`python read_batches.py --url http://127.0.0.1:8000 --batch-size 8 --out batches.jsonl`. It ends when a file of the
name `batches.jsonl.enough` is there and no batch is left.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

from example_trainer.api import check_atropos_api, get_batch, register_trainer
from example_trainer.config import TrainingConfig
from example_trainer.data import pad_data_to_good_offset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    config = TrainingConfig(
        model_name="tiny",
        atropos_url=asked.url,
        batch_size=asked.batch_size,
        gradient_accumulation_steps=1,
        seq_len=128,
        training_steps=1000,
        device="cpu",
    )
    assert check_atropos_api(config.atropos_url)
    register_trainer(config)
    enough = asked.out.with_name(asked.out.name + ".enough")
    num_calls, longest_call_s = 0, 0.0
    while True:
        was_enough = enough.exists()  # looked at before the call: what was posted by then is still read
        began = time.monotonic()
        answer = get_batch(config.atropos_url)
        longest_call_s = max(longest_call_s, time.monotonic() - began)
        num_calls += 1
        if answer["batch"] is not None:
            figures = {"num_calls": num_calls, "longest_call_s": longest_call_s, "at": time.time()}
            with asked.out.open("a") as out:
                out.write(json.dumps(answer | {"tensors": _tensors(answer, asked.batch_size)} | figures) + "\n")
        elif was_enough:
            return
        else:
            time.sleep(0.2)


def _tensors(answer: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """What its trainer makes of a batch: shapes, how many labels are trained, and the logprobs at those."""
    (ids,), (labels,), (advantages,), _, (logprobs,) = pad_data_to_good_offset(copy.deepcopy(answer), batch_size)
    trained = labels != -100
    return {
        "shape": list(ids.shape),
        "same_shape": ids.shape == labels.shape == logprobs.shape,
        "advantages": advantages.flatten().tolist(),
        "num_trained": int(trained.sum()),
        "highest_trained_logprob": float(logprobs[trained].max()),
        "lowest_other_logprob": float(logprobs[~trained].min()),
    }


if __name__ == "__main__":
    main()
