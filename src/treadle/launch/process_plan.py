"""Plan a run: RunConfig + machine facts -> complete settings and the processes to start. Pure.

first    hub, engine, router
                            serve until they are stopped; not started if the run is attached to one that runs already
         trainer            loads its libraries meanwhile, and waits for both. Several ranks are one process each:
                            trainer, trainer-1, ...
then     env                when hub and engine are ready; the run is complete when trainer and env have ended. Several
                            environments are one process each: env-gsm8k, env-arithmetic
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from treadle.budget.shapes import ModelShape
from treadle.config.env import DEFAULT_MAX_AGE, folder_of, labels_of, process_of
from treadle.config.files import secret_variable
from treadle.config.flag_spelling import respell_flags
from treadle.config.schema import SECTIONS_OF_PROCESS, RunConfig
from treadle.config.section import HUB_TABLE
from treadle.config.train import FLOAT32_LR
from treadle.config.values import (
    choose_steps,
    concurrent_sequences,
    explicit_keys,
    longest_sequence,
    value_of,
    with_values,
)
from treadle.errors import ConfigError
from treadle.launch.machine import SHARED_MEMORY, MachineFacts
from treadle.launch.process_spec import (
    NO_TOKENS,
    PORT_FLAG,
    AccessTokens,
    ProcessSpec,
    child_environment,
)
from treadle.launch.ranks import GpuLayout, choose_layout, name_of_rank, rank_variables
from treadle.net.access_tokens import role_token
from treadle.net.address import is_loopback_host, url_to, without_token
from treadle.store.choice import RUN_FILE

CONFIG_FILE = "config.json"
LOG_FOLDER = "logs"


@dataclass(frozen=True)
class RunPlan:
    config: RunConfig
    run_folder: Path
    processes: tuple[ProcessSpec, ...]  # in the order in which they start
    hub_url: str
    notes: tuple[str, ...] = ()  # choices for this machine, with reasons
    observer_token: str = field(default="", repr=False)  # of the hub, if it requires one
    is_env_last: bool = False  # start the environment only after the trainer has published
    derived: frozenset[str] = frozenset()  # keys whose values hold for this run only

    @property
    def watch_url(self) -> str:
        """URL of the hub with the observer token, for the launcher and the page."""
        return f"{without_token(self.hub_url)}/t/{self.observer_token}" if self.observer_token else self.hub_url


def build_plan(
    config: RunConfig,
    facts: MachineFacts,
    *,
    run_folder: Path,
    model_folder: str,
    is_model_local: bool,
    explicit: frozenset[str] | None = None,
    tokens: AccessTokens = NO_TOKENS,
    notes: tuple[str, ...] = (),
    shape: ModelShape | None = None,
) -> RunPlan:
    """Complete every setting that the user did not give; `explicit`: keys that the user gave, such as {"hub.port"};
    `shape`: of the model, None if it is not known."""
    explicit = explicit_keys(config) if explicit is None else explicit
    by_processor, why = choose_by_processor(config, facts, explicit)
    layout = choose_layout(config, facts, explicit, shape)
    notes = (*notes, *layout.notes, *why)
    config = with_values(config, {**by_processor, **layout.settings})
    config.train.check_ranks(config.train.ranks)
    ages = spread_max_age(config, explicit)
    config = with_values(config, ages)
    ports = facts.ports
    hub_url = config.hub_url or url_to(config.hub.host, ports["hub"])
    engine_urls = config.engine_url or tuple(url_to(config.engine.host, ports[name]) for name in engine_names(config))
    is_side_by_side = any(env.max_age >= 1 for env in config.environments)
    threads = max(1, facts.num_cores // 2) if is_side_by_side else facts.num_cores
    longest = longest_sequence(config, explicit)
    derived = {
        "hub.database": run_folder / RUN_FILE,
        "engine.hub_url": hub_url,
        "hub.run_folder": run_folder,
        "engine.threads": max(1, threads // max(1, engines_of_machine(config, facts))),
        "engine.max_model_len": longest,
        "engine.max_num_seqs": concurrent_sequences(config, explicit),
        "train.seq_len": longest,
        **({} if config.engine_url else engine_of_mode(config, run_folder, facts, explicit, layout)),
        **_of_environments(config, run_folder, explicit),
        **_of_distillation(config),
        **_of_router(config, ports, hub_url, tokens),
        "train.seed": config.seed,
        "train.threads": max(1, threads // config.train.ranks),
        "train.save_path": run_folder / "checkpoints",
        "train.metrics_file": run_folder / "metrics.jsonl",
    }
    settled: dict[str, Any] = {
        **{f"{server}.port": port for server, port in ports.items() if server in ("hub", "engine", "router")},
        "train.hub_url": hub_url,
        **dict.fromkeys(config.keys_of_envs("hub_url"), hub_url),
        "train.checkpoint_url": folder_of_copies(config.train.checkpoint_url, run_folder),
        **_engines_of(config, engine_urls, hub_url),
        "engine.model": model_folder,
        "train.model": model_folder,
        "openai.model": model_folder,
        "steps": choose_steps(config, explicit),
        "train.steps": choose_steps(config, explicit),
    }
    # Settings, not derived: `steps`, and ports that the user gave. All other values follow from other settings.
    given_too = (explicit & {"hub.port", "engine.port", "router.port"}) | {"steps"}
    of_this_run = ((derived | ages | dict(layout.settings)).keys() - explicit) | (settled.keys() - given_too)
    resolved = with_values(config, {k: v for k, v in derived.items() if k not in explicit} | settled)
    resolved.check_mix()
    specs = _processes(resolved, facts, run_folder, (hub_url, *engine_urls), tokens, is_offline=is_model_local)
    observer_token = "" if tokens.hub is None else role_token(tokens.hub, "observer")
    if config.train.unused_name:
        notes = (*notes, respell_flags("run", config.train.unused_name, "train"))
    resolved = with_values(resolved, {"hub.fresh": False})  # the queue is emptied once: by a flag of the hub
    return RunPlan(resolved, run_folder, specs, hub_url, notes, observer_token, derived=frozenset(of_this_run))


def engine_names(config: RunConfig) -> list[str]:
    """The processes of the engines that the run starts: ["engine", "engine-1"]."""
    if config.engine_url:
        return []
    return [f"engine-{place}" if place else "engine" for place in range(config.engines)]


def engines_of_machine(config: RunConfig, facts: MachineFacts) -> int:
    """The most engines that a machine of the run has."""
    if facts.num_machines == 1:
        return config.engines
    return max(1, len(config.engine.gpus_of_each))


def _engine_flags(config: RunConfig, facts: MachineFacts, name: str, place: int) -> tuple[str, ...]:
    """What one engine of several has of its own."""
    if not config.has_fleet:
        return ()
    flags = ("--name", name, PORT_FLAG, str(facts.ports[name]))
    shares = config.engine.gpus_of_each
    return (*flags, "--gpus", ",".join(map(str, shares[place % len(shares)]))) if shares else flags


def _engines_of(config: RunConfig, urls: tuple[str, ...], hub_url: str) -> dict[str, Any]:
    """How trainer and environments find the engines: by the URL of the only one, else in the hub's table."""
    if not config.has_fleet:
        return {"train.engine_url": urls, "openai.base_url": f"{urls[0]}/v1"}
    joined: dict[str, Any] = {} if config.engine_url else {"engine.join": hub_url}
    return joined | {"train.engine_url": config.engine_url or HUB_TABLE, "openai.base_url": HUB_TABLE}


def _of_router(config: RunConfig, ports: Mapping[str, int], hub_url: str, tokens: AccessTokens) -> dict[str, Any]:
    """How the router finds the engines, and environments the router."""
    if not config.has_router:
        return {"openai.router_url": ""}
    config.router.check_access(tokens.engine or "")
    return {"router.hub_url": hub_url, "openai.router_url": url_to(config.router.host, ports["router"])}


def _of_environments(config: RunConfig, run_folder: Path, explicit: frozenset[str]) -> dict[str, Any]:
    """Settings of each environment that follow from the run."""
    values: dict[str, Any] = {
        **dict.fromkeys(config.keys_of_envs("seed"), config.seed),
        **dict.fromkeys(config.keys_of_envs("state_dir"), run_folder / "env"),
    }
    if not config.envs:
        return values | {"env.data_dir_to_save_evals": run_folder / "evals"}
    labels, shares = labels_of(config.envs), shares_of(config, explicit)
    for place, (label, share) in enumerate(zip(labels, shares, strict=True)):
        values |= {
            f"envs.{place}.wandb_name": label,
            f"envs.{place}.data_dir_to_save_evals": run_folder / "evals" / folder_of(label),
            f"envs.{place}.num_environments": len(labels),
            f"envs.{place}.min_batch_allocation": share,
        }
    return values


def _of_distillation(config: RunConfig) -> dict[str, Any]:
    """A teacher scores groups with equal scores too, so environments keep them."""
    if not config.train.distill_coef:
        return {}
    return dict.fromkeys(config.keys_of_envs("ensure_scores_are_not_same"), False)


def shares_of(config: RunConfig, explicit: frozenset[str]) -> list[float]:
    """The share of each batch that is reserved for each of several environments: the minimum that the user gave, else
    its share by weight of what the given minimums leave, in whole groups.

    The rest of a batch is filled by weight with available groups. Weights 0.7 and 0.3, groups of 4, batches of 16:
    [0.5, 0.25].
    """
    batch, total = config.train.sequences_per_step, sum(env.inference_weight for env in config.envs)
    keys = config.keys_of_envs("min_batch_allocation")
    given = [env.min_batch_allocation if key in explicit else None for key, env in zip(keys, config.envs, strict=True)]
    left = 1 - sum(minimum or 0.0 for minimum in given)
    total_open = sum(env.inference_weight for env, own in zip(config.envs, given, strict=True) if own is None)
    shares = []
    for env, minimum in zip(config.envs, given, strict=True):
        if minimum is not None:
            shares.append(minimum)
            continue
        share = env.inference_weight * min(1 / total, left / total_open)
        shares.append(int(batch * share / env.group_size + 1e-9) * env.group_size / batch)
    return shares


def choose_by_processor(
    config: RunConfig, facts: MachineFacts, explicit: frozenset[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Settings for an engine on a CPU, or engine and trainer on CPUs, with a note on each."""

    def is_cpu(device: str) -> bool:
        return device == "cpu" or (device == "auto" and not facts.has_gpu)

    values: dict[str, Any] = {}
    notes = []
    if is_cpu(config.engine.device) and config.engine.dtype == "fast" and not facts.has_bf16:
        notes.append("number format: float32, because this processor has no bf16 instructions")
        if "train.lr" not in explicit:
            notes[-1] += f"; learning rate {FLOAT32_LR:g} for it"
            values["train.lr"] = FLOAT32_LR
    # In parallel each would have half of the cores, wait for the other, and train on older samples.
    is_elsewhere = bool(config.engine_url) and not is_loopback_host(urlsplit(config.first_engine_url).hostname or "")
    are_both_here = is_cpu(config.engine.device) and is_cpu(config.train.device) and not is_elsewhere
    if config.max_age is None:
        keys = config.keys_of_envs("max_age")
        given = [value_of(config, key) for key in keys if key in explicit]
        values["max_age"] = DEFAULT_MAX_AGE
        if "train.max_age" in explicit:
            values["max_age"] = config.train.max_age
        elif len(given) == len(keys):
            values["max_age"] = max(given)
        elif are_both_here:
            notes.append("engine and trainer take turns on all cores (--max-age 1: side by side, half of them each)")
            values["max_age"] = 0
    return values, tuple(notes)


def spread_max_age(config: RunConfig, explicit: frozenset[str]) -> dict[str, Any]:
    """Derive the `max_age` of environments, trainer and hub from that of the run.

    Environment: the same, unless it has its own. Trainer: that of the environments which sample in waves, because it
    publishes only after all samples of earlier versions have arrived; it does not wait for a stream. Hub: no bound,
    unless the user says what happens to stale groups; then the same, and the steps that a version lasts.
    """
    own = config.max_age if config.max_age is not None else DEFAULT_MAX_AGE
    keys = config.keys_of_envs("max_age")
    of_envs = {key: value_of(config, key) if key in explicit else own for key in keys}
    in_waves = [age for age, env in zip(of_envs.values(), config.environments, strict=True) if env.pace != "stream"]
    leased_ahead = max(in_waves, default=0)
    if "train.max_age" in explicit and config.train.max_age != leased_ahead:
        raise ConfigError(
            f"env.max_age {leased_ahead} and train.max_age {config.train.max_age} would wait for each other",
            fix="give only --max-age",
        )
    bound = {}
    if "hub.stale" in explicit and "hub.max_age" not in explicit:
        bound = {"hub.max_age": max(of_envs.values()) + config.train.publish_interval - 1}
    return {**of_envs, "train.max_age": leased_ahead, **bound}


def folder_of_copies(checkpoint_url: str, run_folder: Path) -> str:
    """Below the URL that several runs may have."""
    parent = checkpoint_url.removesuffix(f"/{run_folder.name}").rstrip("/")
    return f"{parent}/{run_folder.name}" if parent else ""


def engine_of_mode(
    config: RunConfig, run_folder: Path, facts: MachineFacts, explicit: frozenset[str], layout: GpuLayout
) -> dict[str, Any]:
    """Engine settings that the weight mode requires: shared memory, or LoRA."""
    train = config.train
    are_apart = layout.placement is not None and not layout.placement.is_shared  # on different GPUs
    is_one = not are_apart and not config.has_fleet
    by_memory = train.mode.in_memory and train.broadcast_by in ("auto", "memory") and is_one
    shares = (by_memory or train.single_copy) and config.engine.tensor_parallel_size == 1
    weights_file = run_folder / "engine.weights"
    if facts.has_shared_memory:  # the pid of the launcher separates sessions of a run
        weights_file = SHARED_MEMORY / f"treadle-{run_folder.name}-{facts.launcher_pid}.weights"
    settings: dict[str, Any] = {"engine.weights_file": weights_file if shares else None}
    saved = train.save_path if "train.save_path" in explicit else run_folder
    settings["engine.adapter_root"] = train.live_path or saved  # loads only what the trainer of this run saves
    if train.mode.adapters:
        # The exact rank: the smaller it is, the more versions vLLM can serve at once.
        settings |= {"engine.enable_lora": True, "engine.max_lora_rank": train.lora_r}
        settings["engine.quantization"] = train.quantization
    return settings


def server_addresses(config: RunConfig) -> dict[str, tuple[str, int]]:
    """Host and port of each server that the run starts."""
    addresses = {} if config.hub_url else {"hub": (config.hub.host, config.hub.port)}
    engines = {name: (config.engine.host, config.engine.port + n) for n, name in enumerate(engine_names(config))}
    router = {"router": (config.router.host, config.router.port)} if config.has_router else {}
    return addresses | engines | router


def _processes(
    config: RunConfig,
    facts: MachineFacts,
    run_folder: Path,
    urls: tuple[str, ...],
    tokens: AccessTokens,
    *,
    is_offline: bool,
) -> tuple[ProcessSpec, ...]:
    hub_url, *engine_urls = urls
    ranks = config.train.ranks
    settings = config.model_dump(mode="json")

    def spec(
        name: str, *verb: str, threads: int, ready_url: str | None = None, timeout_s: float = 60.0, kind: str = "",
        rank: int = 0, flags: tuple[str, ...] = (),
    ) -> ProcessSpec:  # fmt: skip
        argv = (facts.python, "-m", "treadle", *verb, "--config", str(run_folder / CONFIG_FILE), *flags)
        argv += ("--trainer-rank", str(rank)) if rank else ()
        environment = {
            **child_environment(facts, threads=threads, is_offline=is_offline),
            **tokens.variables_of(kind or name),
            **secret_variable(settings, *SECTIONS_OF_PROCESS[kind or name]),
            **(rank_variables(rank, ranks) if kind == "trainer" else {}),
        }
        may_move = kind == "engine" and config.has_fleet
        log_path = run_folder / LOG_FOLDER / f"{name}.log"
        return ProcessSpec(name, argv, environment, log_path, ready_url, timeout_s, may_move=may_move)

    engine_threads = config.engine.threads or facts.num_cores
    train_threads = config.train.threads or max(1, facts.num_cores // ranks)
    hub = spec("hub", "hub", threads=1, ready_url=f"{hub_url}/healthz")
    fresh = ("--fresh", "true") if config.hub.fresh else ()
    specs = (
        replace(hub, argv=hub.argv + fresh, first_flags=fresh),
        # Loading a large model from a cold disk takes minutes.
        *(
            spec(
                name,
                "engine",
                threads=engine_threads,
                ready_url=f"{url}/health",
                timeout_s=900.0,
                kind="engine",
                flags=_engine_flags(config, facts, name, place),
            )
            for place, (name, url) in enumerate(zip(engine_names(config), engine_urls, strict=False))
        ),
        *(
            spec(name, "router", threads=1, ready_url=f"{url_to(config.router.host, facts.ports[name])}/health")
            for name in ["router"] * config.has_router
        ),
        *(spec(process_of(label), "env", label, "serve", threads=1, kind="env") for label in labels_of(config.envs)),
        *(() if config.envs else (spec("env", "env", config.env.name, "serve", threads=1),)),
        *(spec(name_of_rank(n), "train", threads=train_threads, kind="trainer", rank=n) for n in range(ranks)),
    )
    return tuple(process for process in specs if process.kind != "hub" or not config.hub_url)
