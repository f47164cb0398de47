"""`treadle doctor`: look, judge, print."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.text import Text

from treadle.config.engine_choice import has_vllm
from treadle.config.load import load_run
from treadle.config.schema import RunConfig
from treadle.engines.vllm.installation import Installation, find_vllm
from treadle.errors import ConfigError, MissingExtra
from treadle.launch.doctor import hardware, looking, settings, software
from treadle.launch.doctor.finding import Check, as_json, is_well, show
from treadle.launch.doctor.live import check_engine, check_hub
from treadle.launch.doctor.logs import NUM_LINES, check_logs
from treadle.launch.doctor.sharing import Surroundings, check_cuda_sharing, check_memory_sharing, try_sharing
from treadle.launch.folder import check_is_run, how_to_go_on, is_going
from treadle.launch.history import reader_of
from treadle.launch.machine import SHARED_MEMORY, count_cores
from treadle.launch.plan import CONFIG_FILE, LOG_FOLDER, wished_addresses
from treadle.launch.process import tail_of
from treadle.launch.report import load_summary
from treadle.net.probe import ServerProbe
from treadle.net.tokens import HUB_TOKEN_VARIABLE as HUB_TOKEN
from treadle.net.tokens import MIN_TOKEN_CHARS, ClientRole, client_token
from treadle.net.urls import shown_url
from treadle.processor import processor_flags
from treadle.wire.bridge import TOKEN_VARIABLE as ENGINE_TOKEN

Tell = Callable[[str], None]
TOKENS = ("HF_TOKEN", "WANDB_API_KEY", HUB_TOKEN, ENGINE_TOKEN)


def _to_nobody(_: str) -> None:
    """For who only wants the result."""


@dataclass(frozen=True)
class Patient:
    """What to look at: nothing named is this machine; a run's folder or addresses are a live system."""

    run_folder: Path | None = None
    hub_url: str = ""
    engine_url: str = ""

    @property
    def is_live(self) -> bool:
        return bool(self.run_folder or self.hub_url or self.engine_url)


def examine(
    config: RunConfig, patient: Patient, *, is_json: bool, verbose: bool = False, console: Console | None = None
) -> int:
    """The exit code: 1 when something is wrong. `config`: the run that this machine is asked about."""
    with telling(Console(stderr=True, quiet=is_json)) as tell:
        checks = (
            examine_live(patient, os.environ, tell) if patient.is_live else examine_machine(config, os.environ, tell)
        )
    if is_json:
        print(json.dumps(as_json(checks), indent=2))
    else:
        show(checks, console or Console(), verbose=verbose)
    return 0 if is_well(checks) else 1


@contextmanager
def telling(console: Console) -> Iterator[Tell]:
    """Says what is being tried, on one line that is replaced and gone in the end; nothing where no terminal is."""
    with console.status("", spinner="line") as status:
        yield lambda what: status.update(Text(what))


def examine_machine(config: RunConfig, env: Mapping[str, str], tell: Tell = _to_nobody) -> list[Check]:
    memory_folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else looking.existing(config.output)
    with ThreadPoolExecutor() as pool:  # what takes long is the loading of torch, in processes of their own
        trying = pool.submit(try_sharing, memory_folder)
        tell(f"looking for the model {config.model}")
        model, cache = looking.survey_model(config.model)
        tell("listing the installed packages")
        packages = looking.list_packages(sys.executable)
        tell("two processes load torch and share weights, as engine and trainer do")
        trials = trying.result()
    tell("asking the GPU's driver")
    driver = looking.look_at_driver(trials.driver_cuda)
    has_gpu = bool(trials.torch.gpus)
    around = Surroundings(env, looking.is_wsl(), looking.is_container())
    tokens = looking.token_sizes(env, TOKENS)
    tell("looking for vLLM, at the disks and at the ports")
    return [
        software.check_python(sys.version_info[:3]),
        *software.check_packages(packages),
        software.check_gpu(trials.torch, driver),
        software.check_driver(trials.torch, driver),
        *_check_vllm(config, has_gpu=has_gpu),
        settings.check_start_method(env, has_gpu=has_gpu),
        settings.check_allocator(env, has_gpu=has_gpu),
        check_memory_sharing(trials, str(memory_folder)),
        check_cuda_sharing(trials, around),
        *_check_hardware(config, cache, has_gpu=has_gpu),
        settings.check_threads(env, count_cores()),
        settings.check_bytecode(env),
        settings.check_model(model, env, has_hub_token=bool(tokens["HF_TOKEN"])),
        settings.check_tokens(tokens, MIN_TOKEN_CHARS),
    ]


def _check_hardware(config: RunConfig, cache: Path, *, has_gpu: bool) -> list[Check]:
    memory = psutil.virtual_memory()
    output, cache = looking.existing(config.output), looking.existing(cache)
    clock, trouble = looking.look_at_clock(output)
    wished = wished_addresses(config)
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return [
        hardware.check_cpu(count_cores(), processor_flags(), has_gpu=has_gpu),
        hardware.check_memory(memory.available, memory.total),
        hardware.check_disk("disk for runs", str(output), shutil.disk_usage(output).free, trouble=trouble),
        hardware.check_disk("disk for models", str(cache), shutil.disk_usage(cache).free),
        hardware.check_shared_memory(str(SHARED_MEMORY), shared),
        hardware.check_file_limit(*resource.getrlimit(resource.RLIMIT_NOFILE), config.hub.max_connections),
        *hardware.check_ports({n: port for n, (_, port) in wished.items()}, looking.owners_of_ports(wished)),
        hardware.check_clock(clock),
    ]


def _check_vllm(config: RunConfig, *, has_gpu: bool) -> list[Check]:
    engine = config.engine
    is_wanted = engine.engine == "vllm" or bool(engine.vllm_python and has_vllm(engine))
    vllm: Installation | None = None
    trouble = ""
    try:
        vllm = find_vllm(engine.vllm_python)
    except MissingExtra as error:
        trouble = error.message
    checks = [software.check_vllm(vllm, trouble, is_wanted=is_wanted, has_gpu=has_gpu)]
    if vllm is not None:
        checks.append(software.check_vllm_fit(looking.list_packages(vllm.python), vllm))
    return checks


def examine_live(patient: Patient, env: Mapping[str, str], tell: Tell = _to_nobody) -> list[Check]:
    checks: list[Check] = []
    hub_url, engine_url = patient.hub_url, patient.engine_url
    hub_token, engine_token = env.get(HUB_TOKEN, ""), env.get(ENGINE_TOKEN, "")
    if patient.run_folder is not None:
        folder = patient.run_folder.expanduser().resolve()
        check_is_run(folder)
        config = load_run(folder / CONFIG_FILE)
        checks.append(check_is_going(folder, config))
        if is_going(folder):
            # The run's tokens are for its own servers, and not for an address that was given.
            if not hub_url:
                hub_url = config.environments[0].rollout_server_url
                hub_token = _token_of_run(config.hub.token_file, "observer", hub_token, checks)
            if not engine_url:
                engine_url = config.train.engine_url
                engine_token = _token_of_run(config.engine.token_file, "environment", engine_token, checks)
        tell(f"reading the logs of {folder.name}")
        logs = sorted((folder / LOG_FOLDER).glob("*.log"))
        checks += check_logs({log.stem: tail_of(log, num_lines=NUM_LINES) for log in logs})
    if hub_url:
        tell(f"asking the hub at {shown_url(hub_url)}")
        checks += check_hub(ServerProbe("hub", hub_url, hub_token, HUB_TOKEN))
    if engine_url:
        engine_url = engine_url.rstrip("/").removesuffix("/v1")  # as our own clients take it
        tell(f"asking the engine at {shown_url(engine_url)}")
        checks += check_engine(ServerProbe("engine", engine_url, engine_token, ENGINE_TOKEN))
    return checks


def _token_of_run(file: Path | None, role: ClientRole, given: str, checks: list[Check]) -> str:
    try:
        return client_token(file, role, given)
    except ConfigError as error:
        checks.append(Check("tokens", "problem", error.message, error.fix))
        return given


def check_is_going(folder: Path, config: RunConfig) -> Check:
    if is_going(folder):
        return Check("run", "ok", f"{folder.name} is going on")
    summary = load_summary(folder)
    if summary is not None and summary.last_words:
        remedy = f"fix that; {how_to_go_on(config, folder, reader_of(config, folder).read().last_step)}"
        return Check("run", "problem", f"{folder.name} was ended by: {summary.last_words.splitlines()[0]}", remedy)
    if summary is not None and (summary.alarms or summary.findings):
        return Check(
            "run", "warning", f"{folder.name} is not going on; it was told: {[*summary.alarms, *summary.findings][-1]}"
        )
    return Check("run", "ok", f"{folder.name} is not going on: only its logs can be asked")
