"""The table of engines at the hub: who may be asked for completions, and which weights each has proved.

    engine   --- report every 2 s: ServedEngine (in POST /v1/reports) ---> hub
    trainer  --- verdicts after every change: POST /v1/engines/verdicts ->  hub  --- GET /v1/engines ---> environments

An engine is known by its `engine_id`, which is new at every start: one that was restarted has proved nothing.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

MAX_ENGINES = 4096
SILENT_AFTER_S = 7.0  # without a report; engines report every two seconds
# Environments with requests in flight read the table this often; with many of them less often.
TABLE_POLL_S = 0.5
TABLE_READS_PER_S = 500.0  # of all environments together
LONGEST_TABLE_POLL_S = 3.0
Text = Annotated[str, msgspec.Meta(max_length=4096)]
EngineId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
# joining: it has not proved the present weights; silent: no report for some seconds; out: see `reason`.
EngineState = Literal["joining", "serving", "silent", "out"]


class ServedEngine(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that joins a run says of itself, and what another one must be started with to join too."""

    engine_id: EngineId
    url: Text
    model: Text  # folder or name
    dtype: Text
    quantization: Text = "none"
    has_lora: bool = False
    max_lora_rank: int | None = None
    max_model_len: int = 0
    max_num_seqs: int = 0
    adapter_root: Text = ""


class EngineVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the trainer knows of one engine."""

    engine_id: EngineId
    url: Text
    state: Literal["joining", "serving", "out"]
    # The policy versions that passed fingerprints and canary, from the first to the last.
    proved_since: int | None = None
    proved_version: int | None = None
    proved_at: float | None = None  # Unix time
    reason: Text = ""  # why it is out


class EngineVerdicts(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/engines/verdicts: all engines that the trainer publishes to. It replaces what was posted before."""

    engines: Annotated[list[EngineVerdict], msgspec.Meta(max_length=MAX_ENGINES)]
    # Higher than that of all earlier posts, also of an earlier trainer: of posts to several hubs the highest holds.
    sequence: Annotated[int, msgspec.Meta(ge=0)] = 0


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the table."""

    engine_id: str
    name: str
    url: str
    state: EngineState
    policy_version: int | None = None  # as the engine reported it last
    proved_since: int | None = None
    proved_version: int | None = None
    proved_at: float | None = None
    heard_s: float = 0.0  # seconds since its last report; of an engine that does not report, since the trainer's
    reason: str = ""
    served: ServedEngine | None = None  # None: it does not report to this hub


class Engines(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/engines."""

    engines: list[EngineEntry]
    has_trainer: bool = False  # whether a trainer publishes to the engines of this table
    num_present: int = 1  # environments that are alive; each reads the table less often the more of them there are
    sequence: int = 0  # of the verdicts in force
    spread_s: float = 0.0  # until all hubs of the run show verdicts that were posted to one of them


class EngineChange(msgspec.Struct, frozen=True, kw_only=True):
    """The state of an engine from this moment on."""

    at: float  # Unix time
    name: str
    state: Literal["joining", "serving", "silent", "out", "gone"]
    proved_version: int | None = None
    reason: str = ""


class EngineHistory(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/engines/history: the changes since the hub was started, oldest first; only the newest are kept."""

    now: float
    changes: list[EngineChange]


def table_interval(wanted_s: float, num_present: int) -> float:
    """Seconds between two reads of the table by one of `num_present` environments.

    >>> [table_interval(TABLE_POLL_S, number) for number in (1, 100, 1000)]
    [0.5, 0.5, 2.0]
    """
    return max(wanted_s, min(LONGEST_TABLE_POLL_S, num_present / TABLE_READS_PER_S))
