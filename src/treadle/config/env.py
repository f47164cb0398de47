"""Define the settings of an environment process: the task, and the engine that it samples from."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from treadle.config.section import Count, Names, PositiveInt, Seconds, Section, option, parse_names, shared
from treadle.errors import ConfigError

OF_TASK = "the task's own, else {}".format  # default of a setting that a built-in task may replace
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Score = Annotated[float, Field(allow_inf_nan=False)]


def parse_object(value: Any) -> Any:
    """'{"low": 2}' -> {"low": 2}. Only text is looked at: the type refuses the rest."""
    if not isinstance(value, str):
        return value
    example = """write it like this, quotes included: --env.args '{"low": 2}'"""
    try:
        parsed = json.loads(value or "{}")
    except json.JSONDecodeError as error:
        raise ValueError(f"--env.args is not JSON: {value} ({error})\n  -> {example}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"--env.args is no JSON object: {value}\n  -> {example}")
    return parsed


@dataclass(frozen=True)
class DataSource:
    """Where rows come from, and how much of what is drawn comes from there: "3" of "3" + "1"."""

    name: str
    weight: str = "1"


def join_sources(value: Any) -> Any:
    """["a.jsonl:3", "b.jsonl"] -> "a.jsonl:3,b.jsonl"."""
    is_list = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    return ",".join(value) if is_list else value


def parse_sources(text: str) -> tuple[DataSource, ...]:
    """The data sources of `--env.data`. One alone has no weight: the colon belongs to its name.

    >>> parse_sources("gsm8k.jsonl:3,openai/gsm8k:main:1")
    (DataSource(name='gsm8k.jsonl', weight='3'), DataSource(name='openai/gsm8k:main', weight='1'))
    >>> parse_sources("openai/gsm8k:2")
    (DataSource(name='openai/gsm8k:2', weight='1'),)
    """
    entries = [entry.strip() for entry in text.split(",")]
    if len(entries) == 1:
        return (DataSource(text),)
    found = [_name_and_weight(entry) for entry in entries]
    return tuple(DataSource(name, weight or "1") for name, weight in found)


def check_sources(text: str) -> str:
    sources = parse_sources(text)
    names = [source.name for source in sources]
    problem = ""
    if len(names) > 1 and not all(names):
        problem = "names no source in one place"
    elif len(set(names)) < len(names):
        problem = f"names {next(name for name in names if names.count(name) > 1)} twice"
    elif unusable := next((source for source in sources if not 0 < float(source.weight) < math.inf), None):
        problem = f"gives {unusable.name} the weight {unusable.weight}, and weights are above 0"
    if problem:
        raise ValueError(f"'{text}' {problem}\n  -> write for example gsm8k.jsonl:3,countdown.jsonl:1")
    return text


def labels_of_sources(sources: Sequence[DataSource]) -> tuple[str, ...]:
    """A short name for each source, as metrics use it.

    >>> labels_of_sources([DataSource("data/gsm8k.jsonl"), DataSource("HuggingFaceH4/MATH-500:default")])
    ('gsm8k', 'MATH-500')
    """
    short = [_short_name(source.name, 1) for source in sources]
    with_folder = [_short_name(source.name, 2) for source in sources]
    labels = [long if short.count(name) > 1 else name for name, long in zip(short, with_folder, strict=True)]
    return tuple(f"{label}-{n}" if labels.count(label) > 1 else label for n, label in enumerate(labels, start=1))


def _short_name(name: str, num_parts: int) -> str:
    parts = [part for part in name.rstrip("/").split("/") if part]
    last = parts[-1].partition(":")[0]
    for suffix in (".jsonl", ".json", ".csv", ".parquet"):
        last = last.removesuffix(suffix)
    return folder_of("-".join([*parts[-num_parts:-1], last]))


Sources = Annotated[str, BeforeValidator(join_sources), AfterValidator(check_sources)]


def check_columns(pairs: tuple[str, ...]) -> tuple[str, ...]:
    for pair in pairs:
        name, equals, column = pair.partition("=")
        if not (name and equals and column):
            raise ValueError(f"'{pair}' is not NAME=COLUMN; write for example question=problem answer=solution")
    return pairs


def parse_part(text: str) -> tuple[int, int]:
    """The first item of a part, and the distance to its next one: `parse_part("2/4") == (1, 4)`, all: (0, 1)."""
    number, _, total = (text or "1/1").partition("/")
    return int(number) - 1, int(total)


def check_part(text: str) -> str:
    if text and not (re.fullmatch(r"[1-9]\d{0,5}/[1-9]\d{0,5}", text) and parse_part(text)[0] < parse_part(text)[1]):
        raise ValueError(f"'{text}' is not a part of the items\n  -> write for example 2/4, the second of four parts")
    return text


MIN_GROUP_SIZE = 2  # a group of one teaches nothing, except with a teacher
DEFAULT_MAX_AGE = 1  # sampling overlaps training; where both compute on the same cores, treadle run takes 0


class ServerConfig(Section):
    """The engine that an environment samples from (Atropos' `--openai.*` flags)."""

    base_url: Names = option(
        ("http://127.0.0.1:9001/v1",),
        "URL of the engine, with or without /v1; several URLs: requests are spread over the engines whose weights are "
        "new enough; hub: over the engines in the hub's table whose weights are verified",
    )
    model: str = shared("model", "its tokenizer and chat template are used")
    server_type: Literal["vllm", "openai"] = option("vllm", "wire format of the engine")
    api_key: str = option(
        "",
        "bearer token, when the engine asks for one; several engines: one for all, or one each, with spaces between; "
        "empty: $TREADLE_ENGINE_TOKEN, which process lists do not show",
    )
    timeout: Seconds = option(1200.0, "seconds to wait for one completion")
    router_url: str = option(
        "",
        "with base_url hub: URL of the router that requests go through (treadle router); answers are still checked "
        "against the hub's table; empty: each request goes to an engine directly",
    )

    @model_validator(mode="after")
    def _a_key_for_each(self) -> ServerConfig:
        num_urls, num_keys = len(self.base_url), len(self.api_key.split())
        if len(set(self.base_url)) != num_urls or not num_urls:
            raise ValueError(
                f"openai.base_url must name each engine once, and it is {' '.join(self.base_url) or 'empty'}"
            )
        if num_keys > 1 and num_keys != num_urls:
            raise ValueError(
                f"openai.api_key has {num_keys} keys for {num_urls} engines: give one for all, or one each"
            )
        return self

    def each(self) -> tuple[ServerConfig, ...]:
        """The same settings for each engine by itself."""
        keys = self.api_key.split()
        return tuple(
            self.model_copy(update={"base_url": (url,), "api_key": keys[i if len(keys) > 1 else 0] if keys else ""})
            for i, url in enumerate(self.base_url)
        )


class DataOptions(Section):
    """Data of a task. The check "settings" of `treadle env NAME validate` lists the settings that the task reads."""

    data: Sources = option(
        "",
        "training rows: a JSONL, JSON, CSV or Parquet file, a folder of them, or the id of a dataset (openai/gsm8k, "
        "openai/gsm8k:main); several with weights: gsm8k.jsonl:3,countdown.jsonl:1",
    )
    data_split: str = option(
        "", "split of a dataset or folder to train on; of a dataset also a part: train[:500]; empty: train"
    )
    data_columns: Annotated[Names, AfterValidator(check_columns)] = option(
        (), "rename columns of the data: NAME=COLUMN gives COLUMN the name NAME (question=problem answer=solution)"
    )
    eval_data: Sources = option(
        "",
        "held-out rows, of several sources one for each in the same order; empty: the dataset's test split, or some "
        "rows of the training data",
    )
    eval_split: str = option(
        "", "split of a dataset or folder to hold out; empty: the first of test, eval, validation, valid, val, dev"
    )
    task: str = option("", "which of the environment's tasks (arithmetic: addition, comparison, multiplication)")
    difficulty: Count = option(0, "difficulty of generated tasks, where there is a choice; 0: the usual one")
    system_prompt: str | None = option(None, "system prompt; empty: the environment's own")
    args: Annotated[dict[str, Any], BeforeValidator(parse_object)] = option(
        {}, "further settings of the environment, as JSON: '{\"low\": 2}'"
    )
    sampling: Literal["even", "difficulty"] = option(
        "even", "even: every item once an epoch; difficulty: those that are sometimes right, more often"
    )


def parse_rewards(value: Any) -> Any:
    """ "boxed_math,my.py:f" -> ("boxed_math", "my.py:f"); what begins with [ or { is JSON."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f"--env.rewards is not JSON: {value} ({error})") from None
    return (value,) if isinstance(value, dict) else parse_names(value)


Rewards = Annotated[tuple[str | dict[str, Any], ...], BeforeValidator(parse_rewards)]


class RewardOptions(Section):
    """How completions are scored."""

    rewards: Rewards = option(
        (),
        "score with these instead of the environment's own: names, FILE.py:FUNCTION, or JSON with weights: "
        """'[{"type": "my.py:is_polite", "weight": 0.2}]'""",
    )
    length_penalty: bool = option(
        False,
        "when a whole group is right: full reward up to half of max_token_length, then falling to none",
        default_text=OF_TASK("false"),
    )
    right: Score = option(
        1.0,
        "lowest score that counts as right when neither the reward (correct) nor the environment (is_right) decides",
    )
    ensure_scores_are_not_same: bool = option(
        False, "drop groups whose scores are all the same, and count them", default_text=OF_TASK("false")
    )
    reward_workers: PositiveInt = option(2, "number of processes that score")
    reward_timeout_s: Seconds = option(
        10.0, "seconds after which a reward function is ended; its completion is marked", default_text=OF_TASK(10.0)
    )
    reward_memory_mb: Count = option(1024, "memory limit of a reward function in MB; 0: no limit")


class PaceOptions(Section):
    """How much is sampled, and how far ahead of training."""

    pace: Literal["auto", "waves", "stream"] = option(
        "auto",
        "waves: the prompts of a step side by side, so that a seed gives the same curve; stream: as many groups as "
        "keep the engine busy; auto: waves for single turns of which no group is dropped, but stream with vLLM on a "
        "GPU that samples ahead (max_age)",
    )
    max_age: Count = shared("max_age", default=DEFAULT_MAX_AGE)
    max_num_workers: int = option(-1, "stream: groups in flight at most; -1: as many as the engine works on")
    worker_timeout: Seconds = option(600.0, "stream: seconds after which a group is given up and sampled again later")
    state_dir: Path = option(
        Path("treadle-env"), "folder for the cursor, and for groups that the hub has not taken yet"
    )
    min_batch_allocation: Share | None = option(
        None,
        "share of every batch that waits for this environment; with several environments in a run, empty: the whole "
        "groups in its share by weight",
    )
    num_environments: PositiveInt = option(
        1, "sampling starts when this many environments are registered at the hub; treadle run sets it"
    )
    processes: PositiveInt = option(
        1, "processes of this environment that treadle run starts, each with a part of the items (stream)"
    )
    items: Annotated[str, AfterValidator(check_part)] = option(
        "", "part of the items that this process takes (stream): 2/4 is the second of four; empty: all"
    )
    total_steps: int = option(-1, "stop after this many steps; -1: when the trainer has taken its last")


class EvaluationOptions(Section):
    """Evaluations on held-out prompts, and what is logged of them."""

    num_eval: Count = option(256, "held-out prompts of an evaluation; 0 evaluates never", default_text=OF_TASK(256))
    steps_per_eval: Count = option(
        0,
        "steps between evaluations (none in the last max_age steps); 0: only before and after training",
        default_text=OF_TASK(0),
    )
    eval_samples: PositiveInt = option(1, "answers per prompt; more than one gives pass@k")
    eval_temperature: NotNegative | None = option(None, "0 is greedy; empty: 0 for one answer, else the training's")
    eval_limit_ratio: Share = option(0.5, "share of the engine that an evaluation may take beside training (stream)")
    data_dir_to_save_evals: Path | None = option(None, "folder for the evaluations' results")
    data_path_to_save_groups: Path | None = option(None, "also write every group to this JSONL file")
    use_trackers: bool = option(True, "log evaluations and some rollouts to the trackers that the trainer uses")


class EnvConfig(DataOptions, RewardOptions, PaceOptions, EvaluationOptions):
    """An environment process (Atropos' `--env.*` flags)."""

    name: str = option("arithmetic", "a built-in environment, verifiers:NAME, or the path of a .py file")
    group_size: PositiveInt = option(8, "completions per prompt")
    max_token_length: PositiveInt = option(16, "longest completion, in tokens", default_text=OF_TASK(512))
    temperature: NotNegative = option(1.0, "sampling temperature in training", default_text=OF_TASK(1.0))
    seed: int = shared("seed")
    hub_url: str = shared("hub_url")
    inference_weight: float = option(
        1.0, "weight of this environment among several: its share of each batch is this over the sum"
    )
    wandb_name: str | None = option(None, "name to register under; the environment's own when empty")

    @property
    def own_name(self) -> str:
        """ "gsm8k", or "my_env" of ./my_env.py."""
        return Path(self.name.partition(".py")[0]).name

    @property
    def task_name(self) -> str:
        """A one-word name of the task."""
        return self.task or self.own_name


def labels_of(environments: Sequence[EnvConfig]) -> list[str]:
    """A name for each environment of a run: its wandb_name, else its own name, with the task where two have the same.

    >>> labels_of([EnvConfig(name="gsm8k"), EnvConfig(task="addition"), EnvConfig(task="comparison")])
    ['gsm8k', 'arithmetic-addition', 'arithmetic-comparison']
    """
    times = Counter(env.own_name for env in environments if not env.wandb_name)
    labels = []
    for env in environments:
        with_task = times[env.own_name] > 1 and bool(env.task)
        labels.append(env.wandb_name or (f"{env.own_name}-{env.task}" if with_task else env.own_name))
    unreadable = next((label for label in labels if "," in label or _name_and_weight(label)[1]), None)
    if unreadable is not None:
        raise ConfigError(
            f"an environment of this run is called '{unreadable}', which --env reads as several names or as a weight",
            fix="give its [[env]] table a wandb_name without a comma and without a colon and a number at the end",
        )
    twice = next((label for label, count in Counter(map(folder_of, labels)).items() if count > 1), None)
    if twice is not None:
        raise ConfigError(
            f"two environments of this run are called '{twice}'", fix="give each [[env]] table a wandb_name of its own"
        )
    return labels


def folder_of(label: str) -> str:
    """The name of an environment's files and folders among several: `folder_of("verifiers:wordle")` is
    "verifiers-wordle"."""
    return re.sub(r"[^\w.+-]", "-", label)


def process_of(label: str) -> str:
    """The process, and the log, of one environment among several: `process_of("gsm8k") == "env-gsm8k"`."""
    return f"env-{folder_of(label)}"


def parse_environments(text: str) -> list[tuple[str, str]]:
    """(name, weight) of each environment in `--env`; a weight that was not given is "".

    >>> parse_environments("gsm8k:0.7,./my_env.py:mine:0.3,verifiers:wordle")
    [('gsm8k', '0.7'), ('./my_env.py:mine', '0.3'), ('verifiers:wordle', '')]
    """
    found = [_name_and_weight(entry.strip()) for entry in text.split(",")]
    if not all(name for name, _ in found):
        raise ConfigError(f"--env '{text}' names no environment in one place", fix="--env gsm8k:0.7,arithmetic:0.3")
    return found


def _name_and_weight(entry: str) -> tuple[str, str]:
    name, _, last = entry.rpartition(":")
    has_weight = bool(name) and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", last) is not None
    return (name, last) if has_weight else (entry, "")
