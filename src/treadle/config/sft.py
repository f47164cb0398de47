"""Define the settings of `treadle sft`, the supervised stage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from treadle.config.env import check_columns
from treadle.config.section import Count, Names, PositiveInt, Section, option

# What `treadle sft` takes where the user gives no value; everything else has the default of [train].
BATCH_SIZE = 16
FULL_LR, LORA_LR = 5e-5, 2e-4
CHECKPOINT_INTERVAL = 100
WARMUP_SHARE = 0.05  # of the steps
DEFAULTS_IN_WORDS = {
    "steps": "as many as the epochs need",
    "batch_size": str(BATCH_SIZE),
    "lr": f"{FULL_LR:g}; with lora {LORA_LR:g}",
    "warmup_steps": f"{100 * WARMUP_SHARE:g} percent of the steps",
    "checkpoint_interval": str(CHECKPOINT_INTERVAL),
    "dtype": "bfloat16; float32 on a CPU without bf16",
    "merge_final": "true with lora",
    "weight_bridge_mode": "offline",
}


class SftConfig(Section):
    """The supervised stage: which rows are trained on, for how long, and which of them are held out."""

    data: str = option(
        "",
        "training rows: a JSONL, JSON, CSV or Parquet file, a folder of them, or the id of a dataset; a row has "
        "messages, or prompt and completion, or text",
    )
    data_split: str = option("", "split of a dataset or folder to train on; empty: train")
    data_columns: Annotated[Names, AfterValidator(check_columns)] = option(
        (), "rename columns of the data: NAME=COLUMN gives COLUMN the name NAME (prompt=question completion=answer)"
    )
    system_prompt: str = option("", "system message of rows with prompt and completion that have none of their own")
    from_run: Path | None = option(
        None, "instead of data: train on the completions of this run that scored at least min_score"
    )
    min_score: float = option(1.0, "with --from: lowest score of a completion that is trained on")
    epochs: PositiveInt = option(3, "passes over the rows; --steps ends earlier or later")
    held_out: Annotated[float, Field(ge=0, lt=1)] = option(
        0.05, "share of the prompts that are held out to measure the loss, at most 256 rows; 0: none"
    )
    eval_data: str = option("", "held-out rows from another file or dataset, instead of a share of the data")
    steps_per_eval: Count = option(
        0, "steps between measurements of the held-out loss; 0: at most ten times, in about a tenth of the time"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_source(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("data") and values.get("from_run"):
            raise ValueError("data and from are both given: train on rows, or on the completions of a run")
        return values

    @property
    def source(self) -> str:
        """What is trained on, in a word; "" if nothing is named."""
        return self.data or ("" if self.from_run is None else str(self.from_run))
