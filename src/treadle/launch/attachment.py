"""Attach a run to a hub or an engine that runs already: `treadle run --hub-url URL --engine-url URL`.

merge_addresses   merge the settings that name the hub or the engine into hub_url and engine_url of the run
attach            wait until both answer; refuse a hub with the queue of another run, and an engine with another model
                  or with the weights of another run
settle_engine     copy what the engine reports into the engine section of the run; choose the weight mode. Pure.

The launcher starts missing servers, and never stops servers that it did not start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from treadle.config.schema import RunConfig
from treadle.config.section import HUB_TABLE
from treadle.config.train import FLOAT32_LR
from treadle.config.values import value_of, with_values
from treadle.errors import ConfigError
from treadle.launch.process_spec import AccessTokens
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, role_token
from treadle.net.address import is_loopback_host, shown_url, without_token
from treadle.net.probe import ProbeAnswer, ServerProbe
from treadle.sync.model_folders import LiveFolder, is_same_model
from treadle.wire.bridge import TOKEN_VARIABLE as ENGINE_TOKEN_VARIABLE
from treadle.wire.bridge import BridgeInfo
from treadle.wire.hub import HubStatus

# All settings that name the hub or the engine: of the run, and of processes that are started one by one.
HUB_KEYS = ("hub_url", "train.hub_url")  # and those of the environments
ENGINE_KEYS = ("engine_url", "train.engine_url", "openai.base_url")
NO_CONNECTION_S = 10.0  # timeout if the server does not accept connections
# Timeout if it does and is not ready: an engine answers when it has loaded its model.
NOT_READY_S = {"hub": 30.0, "engine": 900.0}
POLL_S = 0.25
_WITH_ARTICLE = {"hub": "a hub", "engine": "an engine"}
_REQUEST_S = 5.0  # timeout of one request

T = TypeVar("T", bound=msgspec.Struct)
Say = Callable[[str], None]


def merge_addresses(config: RunConfig, given: frozenset[str]) -> RunConfig:
    """Set all settings that name the hub or the engine to the URL that the user gave; `given`: keys of the user.

    `--train.hub-url URL` means `--hub-url URL`: a run whose processes call different hubs would wait for ever.
    """
    of_envs = config.keys_of_envs("hub_url")
    hub_url = "".join(_same_urls(config, given, "hub", (*HUB_KEYS, *of_envs)))
    engine_urls = _same_urls(config, given, "engine", ENGINE_KEYS)
    values: dict[str, Any] = {}
    if hub_url:
        values |= {"hub_url": hub_url, "train.hub_url": hub_url, **dict.fromkeys(of_envs, hub_url)}
        if "engine.hub_url" not in given:  # that of a resumed run may lack the token that is given now
            values["engine.hub_url"] = hub_url
    if engine_urls:
        called = (f"{engine_urls[0]}/v1",) if len(engine_urls) == 1 else (HUB_TABLE,)
        if len(engine_urls) > 1 and "train.weight_bridge_mode" not in given:
            values["train.weight_bridge_mode"] = "reload"  # several engines get the weights through files
        values |= {"engine_url": engine_urls, "train.engine_url": engine_urls, "openai.base_url": called}
    return with_values(config, values) if values else config


def _same_urls(config: RunConfig, given: frozenset[str], kind: str, keys: tuple[str, ...]) -> tuple[str, ...]:
    """The URLs that the user gave for this server, in one setting or the same in several; () if the run starts its
    own."""
    named = {key: urls for key in keys if key in given and (urls := _urls_of(config, key, kind))}
    if not named:
        own = getattr(config, f"{kind}_url")
        return (own,) if isinstance(own, str) and own else tuple(own)
    (first, urls), *others = named.items()
    for key, other in others:
        if _on_loopback(other) != _on_loopback(urls):
            raise ConfigError(
                f"{_flag(first)} {_shown(urls)} and {_flag(key)} {_shown(other)} name different {kind}s",
                fix=f"give only --{kind}-url",
            )
    return urls


def _on_loopback(urls: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(url.replace("//localhost", "//127.0.0.1", 1) for url in urls)


def _shown(urls: tuple[str, ...]) -> str:
    return " ".join(map(shown_url, urls))


def _urls_of(config: RunConfig, key: str, kind: str) -> tuple[str, ...]:
    value = value_of(config, key)
    urls = (value,) if isinstance(value, str) else tuple(value)
    urls = tuple(url.rstrip("/").removesuffix("/v1") for url in urls if url)
    if urls == (HUB_TABLE,):  # derived from --engines
        return ()
    for url in urls:
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url:
            raise ConfigError(
                f"{_flag(key)} '{without_token(url)}' is not the URL of {_WITH_ARTICLE[kind]}",
                fix=f"--{kind}-url http://127.0.0.1:PORT",
            )
    if len(set(urls)) < len(urls):
        raise ConfigError(f"{_flag(key)} names an engine twice: {_shown(urls)}", fix="name each once")
    return urls


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")


def unused_settings(config: RunConfig, given: frozenset[str]) -> tuple[str, ...]:
    """Notes on --hub.* and --engine.* settings without effect, because that server runs already."""
    notes = []
    used = {"hub": ("hub.token_file",), "engine": ("engine.token_file", "engine.model")}
    for kind, urls in config.attached_urls.items():
        unused = sorted(key for key in given if key.startswith(f"{kind}.") and key not in used[kind])
        if unused:
            flags = ", ".join(_flag(key) for key in unused)
            notes.append(f"no effect: {flags}; the {kind} at {_shown(urls)} keeps what it was started with")
    return tuple(notes)


@dataclass(frozen=True)
class AttachedRun:
    """The settings of a run, completed with the answers of its servers.

    decided    keys whose values the engine reported
    notes      lines for the user
    was_begun  an earlier trainer of this run is registered at the hub, so an environment would not wait for the new one
    """

    config: RunConfig
    decided: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    engine: BridgeInfo | None = None
    was_begun: bool = False

    @property
    def derived(self) -> frozenset[str]:
        """Keys to save as derived: settings of attached servers, and how weights reach them."""
        keys = {
            f"{kind}.{name}" for kind in self.config.attached_urls for name in getattr(self.config, kind).model_dump()
        }
        return frozenset(keys | ({"train.use_shared_memory"} if self.engine is not None else set()))


def attach(
    config: RunConfig, explicit: frozenset[str], tokens: AccessTokens, say: Say, last_step: int | None = None
) -> AttachedRun:
    """Wait for the attached servers, and compare them with the run; `last_step` None: a new run."""
    was_begun = False
    hub_notes: tuple[str, ...] = ()
    if config.hub_url:
        token = "" if tokens.hub is None else role_token(tokens.hub, "observer")
        hub = ServerProbe("hub", config.hub_url, token, HUB_TOKEN_VARIABLE, _REQUEST_S)
        status = _ask(hub, "/healthz", "/v1/status", HubStatus, say)
        _check_queue(config, status, last_step)
        was_begun = last_step is not None and status.started
        hub_notes = (f"hub at {shown_url(config.hub_url)}: it runs already, and this run uses it",)
    if not config.engine_url:
        return AttachedRun(config, notes=hub_notes, was_begun=was_begun)
    token = "" if tokens.engine is None else role_token(tokens.engine, "trainer")
    infos = {}
    for url in config.engine_url:
        engine = ServerProbe("engine", url, token, ENGINE_TOKEN_VARIABLE, _REQUEST_S)
        infos[url] = _ask(engine, "/health", "/bridge/info", BridgeInfo, say)
        if last_step is None:
            refuse_used_engine(config, url, infos[url])
    info = infos[config.first_engine_url]
    for url, other in infos.items():
        _refuse_other_kind(config.first_engine_url, info, url, other)
    config, decided, notes = settle_engine(choose_model(config, info, explicit), info, explicit)
    return AttachedRun(config, decided, (*hub_notes, *notes), info, was_begun)


def _check_queue(config: RunConfig, status: HubStatus, last_step: int | None) -> None:
    """Refuse a hub with the queue of another run, or without the queue of this one."""
    # A new run begins with step 1, and a used hub would return the batch that it has recorded for that step.
    if last_step is None and (status.started or status.step or status.trained_groups or status.leased_groups):
        raise ConfigError(
            f"the hub at {shown_url(config.hub_url)} has the queue of another run, which is at step {status.step}",
            fix="start it with an empty one (treadle hub --fresh), or leave --hub-url out: the run then starts a hub",
        )

    # A resumed run trains on the batches that its hub has recorded.
    if last_step and not status.accepted_groups:
        raise ConfigError(
            f"this run has taken {last_step} steps, and the hub at {shown_url(config.hub_url)} has no group of it",
            fix="start the hub with the --database that it had, give its address by --hub-url, or start a new run",
        )


def _wait_for(server: ServerProbe, path: str, say: Say) -> None:
    """Wait until GET `path` answers 200."""
    begun, has_said = time.monotonic(), False
    while True:
        answer = server.ask(path)
        if answer.status == 200:
            return
        is_busy = answer.is_late or answer.status == 503
        if answer.status and not is_busy:
            raise _refused(server, path, answer)
        waited_s = time.monotonic() - begun
        if waited_s > (NOT_READY_S[server.kind] if is_busy else NO_CONNECTION_S):
            why = answer.trouble or f"it answers {answer.summary}"
            port = urlsplit(server.url).port
            command = f"treadle {server.kind}" + ("" if port is None else f" --port {port}")
            raise ConfigError(
                f"no {server.kind} is ready at {server.shown} after {waited_s:.0f} s: {why}",
                fix=f"start it ({command}), correct --{server.kind}-url, or leave it out: the run then starts one",
            )
        if is_busy and not has_said:
            has_said = True
            say(f"waiting for the {server.kind} at {server.shown}: it takes connections and is not ready yet")
        time.sleep(POLL_S)


def _ask(server: ServerProbe, health_path: str, path: str, kind: type[T], say: Say) -> T:
    """Wait until the server is ready, then GET `path`."""
    _wait_for(server, health_path, say)
    answer = server.ask(path)
    try:
        if answer.status == 200:
            return msgspec.json.decode(answer.content, type=kind)
    except msgspec.MsgspecError:
        pass
    raise _refused(server, path, answer)


def _refused(server: ServerProbe, path: str, answer: ProbeAnswer) -> ConfigError:
    if answer.status in (401, 403):
        return ConfigError(
            f"the {server.kind} at {server.shown} asks for its token: {answer.summary}",
            fix=f"put it into {server.token_variable}, or name its file: --{server.kind}.token-file FILE",
        )
    wanted = _WITH_ARTICLE[server.kind]
    return ConfigError(
        f"what answers at {server.shown}{path} is not {wanted} of this release of Treadle: {answer.summary}",
        fix=f"correct --{server.kind}-url",
    )


def _refuse_other_kind(first: str, info: BridgeInfo, url: str, other: BridgeInfo) -> None:
    """Several engines must serve the same policy, in the same number format."""
    for what in ("dtype", "quantization", "has_lora"):
        if getattr(info, what) != getattr(other, what):
            raise ConfigError(
                f"the engine at {shown_url(first)} has {what} {getattr(info, what)}, and the one at {shown_url(url)} "
                f"{getattr(other, what)}",
                fix="start all engines of a run with the same settings",
            )
    if not is_same_model(info.model_name, Path(other.model_name)):
        raise ConfigError(
            f"the engine at {shown_url(first)} serves {info.model_name}, and the one at {shown_url(url)} "
            f"{other.model_name}",
            fix="start all engines of a run with the same --model",
        )


def refuse_used_engine(config: RunConfig, url: str, info: BridgeInfo) -> None:
    """For a new run: until it is restarted, an engine takes the weights of one run (engines/api/context.py)."""
    if not config.train.mode.publishes:
        return
    where = f"the engine at {shown_url(url)}"
    fix = "restart the engine, or leave --engine-url out: the run then starts one"
    if info.update_count:
        raise ConfigError(f"{where} serves policy version {info.update_count} of another run", fix=fix)
    if info.is_paused:
        raise ConfigError(f"{where} is held in the middle of a publish", fix=fix)


def choose_model(config: RunConfig, info: BridgeInfo, explicit: frozenset[str]) -> RunConfig:
    """The model of the engine if the user named none; another one is refused."""
    served, where = Path(info.model_name), shown_url(config.first_engine_url)
    if LiveFolder(config.train).holds(served):  # this run restarted the engine with its own weights
        return config
    if "model" not in explicit:
        if not served.is_dir():
            raise ConfigError(
                f"the engine at {where} serves {served}, which is no folder of this machine",
                fix="name the same model by --model",
            )
        return with_values(config, {"model": str(served)})
    if not is_same_model(config.model, served):
        raise ConfigError(
            f"the engine at {where} serves {served}, and the run is to train {config.model}",
            fix=f"--model {served}, or start the engine with --model {config.model}",
        )
    return config


def settle_engine(
    config: RunConfig, info: BridgeInfo, explicit: frozenset[str]
) -> tuple[RunConfig, frozenset[str], tuple[str, ...]]:
    """(settings with what the engine reports, keys whose values it reported, notes). Pure."""
    reported: dict[str, Any] = {
        "engine.engine": info.engine,
        "engine.device": info.device,
        "engine.dtype": info.dtype,
        "engine.max_model_len": info.max_model_len,
        "engine.max_num_seqs": info.max_num_seqs,
        "engine.enable_lora": info.has_lora,
        "engine.quantization": info.quantization,
        "engine.weights_file": None,
    }
    where = shown_url(config.first_engine_url)
    notes = [f"engine at {where}: {info.engine} {info.engine_version}, {info.dtype} on {info.device}"]
    chosen, note = _choose_weight_transfer(config, info)
    if note:
        notes.append(note)
    if info.dtype == "float32" and "train.lr" not in explicit:
        chosen["train.lr"] = FLOAT32_LR
        notes[0] += f"; learning rate {FLOAT32_LR:g} for float32"
    settled = with_values(config, reported | chosen)
    settled.check_engine()
    return settled, frozenset(reported), tuple(notes)


def _choose_weight_transfer(config: RunConfig, info: BridgeInfo) -> tuple[dict[str, Any], str]:
    """Settings by which new weights reach an engine that this run did not start, and a note for the user."""
    train, where = config.train, f"the engine at {shown_url(config.first_engine_url)}"
    if train.mode.adapters and not info.has_lora:
        raise ConfigError(
            f"{where} takes no adapters, which weight_bridge_mode {train.weight_bridge_mode} publishes",
            fix=f"start it with treadle engine --enable-lora --max-lora-rank {train.lora_r}",
        )
    if train.mode.adapters and info.max_lora_rank is not None and train.lora_r > info.max_lora_rank:
        raise ConfigError(
            f"{where} takes adapters up to rank {info.max_lora_rank}, and train.lora_r is {train.lora_r}",
            fix=f"--train.lora-r {info.max_lora_rank}, or start it with treadle engine --max-lora-rank {train.lora_r}",
        )
    if not train.mode.in_memory and not train.single_copy:
        return {}, ""
    is_here = is_loopback_host(urlsplit(config.first_engine_url).hostname or "")
    if info.shared_weights and is_here:
        return {}, ""
    why = f"{where} shares no weights" if is_here else f"{where} is on another machine"
    needs = "single_copy" if train.single_copy else "broadcast_by memory" if train.broadcast_by == "memory" else ""
    if needs:
        raise ConfigError(
            f"train.{needs} needs weights that engine and trainer share, and {why.removeprefix('the engine ')}",
            fix="start the engine on this machine with treadle engine --weights-file /dev/shm/mine.weights, or leave "
            "that setting out",
        )
    if train.use_shared_memory:
        return {}, ""
    return {"train.use_shared_memory": True}, f"{why}: the trainer broadcasts new ones to it"


def check_live_folder(config: RunConfig, info: BridgeInfo) -> None:
    """For modes that restart the engine from files: refuse a folder outside of its --adapter-root. In the other modes
    the engine is sent files that it cannot load from there."""
    train = config.train
    if not train.mode.restarts:
        return
    live, output = (train.live_path or train.save_path).resolve(), config.output.resolve()
    written = output if live.is_relative_to(output) else live
    root = Path(info.adapter_root)
    if not live.is_relative_to(root):
        raise ConfigError(
            f"the engine at {shown_url(config.first_engine_url)} loads weights and adapters from {root} only, and this "
            f"run writes them to {written}",
            fix=f"start it with treadle engine --adapter-root {written}, or give --train.live-path a folder in {root}",
        )
