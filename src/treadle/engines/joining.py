"""Join a running run: settings of its engines from the hub's table, and what this engine says of itself there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from treadle.config import EngineConfig
from treadle.config.schema import adapter_root
from treadle.engines.interface import EngineFacts
from treadle.errors import ConfigError, HubError
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE, bearer_headers
from treadle.net.address import address_towards, is_loopback, shown_url, url_to
from treadle.net.client import OK, BlockingHttpClient, NoAnswer
from treadle.wire.engines import Engines, ServedEngine

ROUTE = "/v1/engines"
ASK_TIMEOUT_S = 10.0
# Settings that all engines of a run have in common.
_SHARED = frozenset({
    "model", "dtype", "quantization", "enable_lora", "max_lora_rank", "max_model_len", "max_num_seqs", "adapter_root",
})  # fmt: skip
_BEST_FIRST = ("serving", "silent", "joining", "out")  # whose settings are copied
_ANY_ADDRESS = ("0.0.0.0", "::", "")  # noqa: S104 - compared, not listened on


def with_settings_of_run(config: EngineConfig) -> EngineConfig:
    """With --join: the settings that were not given become those of the engines in the hub's table."""
    if not config.join:
        return config
    _check_reachable(config)
    given = config.model_fields_set
    values: dict[str, Any] = {} if config.hub_url else {"hub_url": config.join}
    if "name" not in given:
        values["name"] = f"engine at {urlsplit(own_url(config)).netloc}"
    if not given.issuperset(
        _SHARED
    ):  # those that treadle run starts have all settings, and the hub may be starting too
        rows = sorted(fetch_table(config.join).engines, key=lambda entry: _BEST_FIRST.index(entry.state))
        peers = [entry.served for entry in rows if entry.served is not None]
        if not peers and "model" not in given:
            raise ConfigError(
                f"no engine reports to the hub at {shown_url(config.join)}, so the run's settings are unknown",
                fix="give --model and the other settings of the run here, or wait until another engine has joined",
            )
        values |= {key: value for peer in peers[:1] for key, value in _settings_of(peer).items() if key not in given}
    model = values.get("model", "")
    if model.startswith(("/", "~")) and not Path(model).expanduser().is_dir():
        raise ConfigError(
            f"the engines of this run serve {model}, and there is no such folder on this machine",
            fix="give --model the same model here",
        )
    return config.model_copy(update=values)


def _settings_of(peer: ServedEngine) -> dict[str, Any]:
    """How to start an engine like this one."""
    lora = {"max_lora_rank": peer.max_lora_rank} if peer.has_lora and peer.max_lora_rank else {}
    return lora | {
        "model": peer.model,
        "dtype": peer.dtype,
        "quantization": peer.quantization,
        "enable_lora": peer.has_lora,
        "max_model_len": peer.max_model_len,
        "max_num_seqs": peer.max_num_seqs,
        "adapter_root": Path(peer.adapter_root) if peer.adapter_root else None,
    }


def _check_reachable(config: EngineConfig) -> None:
    if is_loopback(own_url(config)) and not is_loopback(config.join):
        raise ConfigError(
            f"the hub at {shown_url(config.join)} is on another machine, and this engine listens on {config.host}, "
            "which only this machine reaches",
            fix="--host 0.0.0.0 --token-file FILE, with the token of the run's other engines",
        )


def fetch_table(hub_url: str) -> Engines:
    client = BlockingHttpClient(
        hub_url, headers=bearer_headers(os.environ.get(HUB_TOKEN_VARIABLE)), timeout_s=ASK_TIMEOUT_S
    )
    try:
        with client:
            answer = client.request("GET", ROUTE)
    except NoAnswer as error:
        raise HubError(
            f"the hub at {shown_url(hub_url)} does not answer: {error}", fix="give --join the URL of a run's hub"
        ) from None
    if answer.status != OK:
        raise HubError(
            f"the hub at {shown_url(hub_url)} refused GET {ROUTE} with status {answer.status}: {answer.message}",
            fix=f"put the token for engines (treadle token engine) into {HUB_TOKEN_VARIABLE}",
        )
    try:
        return msgspec.json.decode(answer.content, type=Engines)
    except msgspec.MsgspecError as error:
        raise HubError(
            f"what answers at {shown_url(hub_url)} has no table of engines: {error}", fix="use a hub of this release"
        ) from None


def own_url(config: EngineConfig) -> str:
    """The URL by which the trainer and the environments reach this engine."""
    host = config.host
    if host in _ANY_ADDRESS and not is_loopback(config.join):
        host = _address_towards(config.join)
    return url_to(host, config.port)


def _address_towards(url: str) -> str:
    """This machine's address on the way to `url`."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    try:
        return address_towards(host, port)
    except OSError as error:
        raise ConfigError(f"there is no way to the hub at {shown_url(url)}: {error}", fix="correct --join") from None


def served_engine(engine_id: str, config: EngineConfig, facts: EngineFacts) -> ServedEngine:
    return ServedEngine(
        engine_id=engine_id,
        url=own_url(config),
        model=str(facts.folder),
        dtype=facts.dtype,
        quantization=facts.quantization,
        has_lora=facts.has_lora,
        max_lora_rank=facts.max_lora_rank,
        max_model_len=facts.max_model_len,
        max_num_seqs=facts.max_num_seqs,
        adapter_root=str(adapter_root(config)),
    )
