"""Run `treadle doctor`: collect the findings about this machine or a live run, and print them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
from rich.console import Console
from rich.text import Text

from treadle.config.load import load_run
from treadle.config.schema import RunConfig, requires_vllm
from treadle.doctor import checks, survey
from treadle.doctor.live import NUM_LINES, check_engine, check_hub, check_logs
from treadle.doctor.survey import check_cuda_sharing, check_memory_sharing, try_sharing
from treadle.engines.vllm.command import Installation, find_vllm
from treadle.errors import ConfigError, MissingExtra
from treadle.formatting import Finding, problems, show_findings
from treadle.launch.child_process import tail_of
from treadle.launch.folder import is_run_live, nearest_existing, resume_advice
from treadle.launch.machine import SHARED_MEMORY, count_cores
from treadle.launch.mps import CONTROL as MPS_CONTROL
from treadle.launch.process_plan import CONFIG_FILE, LOG_FOLDER, server_addresses
from treadle.net.access_tokens import HUB_TOKEN_VARIABLE as HUB_TOKEN
from treadle.net.access_tokens import MIN_TOKEN_CHARS, ClientRole, client_token
from treadle.net.address import shown_url
from treadle.net.connections import HttpLimits
from treadle.net.probe import ServerProbe
from treadle.report.history import check_is_run, reader_of
from treadle.report.summary import load_summary
from treadle.support import processor_flags
from treadle.wire.bridge import TOKEN_VARIABLE as ENGINE_TOKEN

Report = Callable[[str], None]
TOKENS = ("HF_TOKEN", "WANDB_API_KEY", HUB_TOKEN, ENGINE_TOKEN)


@dataclass(frozen=True)
class DoctorTarget:
    """What to check: a live system if a run folder or an address is given, else this machine."""

    run_folder: Path | None = None
    hub_url: str = ""
    engine_url: str = ""


def diagnose(
    config: RunConfig, target: DoctorTarget, *, is_json: bool, verbose: bool = False, console: Console | None = None
) -> int:
    """Print the findings. Exit code 1: there is a problem. `config`: the run that is to start on this machine."""
    # The current check, on one line that is removed at the end; nothing without a terminal.
    with Console(stderr=True, quiet=is_json).status("", spinner="line") as status:

        def report(what: str) -> None:
            status.update(Text(what))

        if target == DoctorTarget():
            findings = check_machine(config, os.environ, report)
        else:
            findings = check_live(target, os.environ, report)
    if is_json:
        checks = [asdict(finding) for finding in findings]
        print(json.dumps({"ok": not problems(findings), "checks": checks}, indent=2))
    else:
        show_findings(findings, console or Console(), verbose=verbose)
    return 1 if problems(findings) else 0


def check_machine(config: RunConfig, env: Mapping[str, str], report: Report) -> list[Finding]:
    memory_folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else nearest_existing(config.output)
    with ThreadPoolExecutor() as pool:  # loading torch in two processes takes longest
        testing = pool.submit(try_sharing, memory_folder)
        report(f"looking for the model {config.model}")
        model, cache = survey.survey_model(config.model)
        report("listing the installed packages")
        packages = survey.list_packages(sys.executable)
        report("two processes load torch and share weights, as engine and trainer do")
        sharing = testing.result()
    report("asking the GPU's driver")
    driver = survey.survey_driver(sharing.driver_cuda)
    has_gpu = bool(sharing.torch.gpus)
    tokens = survey.token_sizes(env, TOKENS)
    report("looking for vLLM, at the disks and at the ports")
    return [
        checks.check_python(sys.version_info[:3]),
        *checks.check_packages(packages),
        checks.check_gpu(sharing.torch, driver),
        checks.check_driver(sharing.torch, driver),
        *_check_vllm(config, has_gpu=has_gpu),
        checks.check_start_method(env, has_gpu=has_gpu),
        checks.check_allocator(env, has_gpu=has_gpu),
        checks.check_mps(shutil.which(MPS_CONTROL), has_gpu=has_gpu),
        check_memory_sharing(sharing, str(memory_folder)),
        check_cuda_sharing(sharing, survey.survey_host(env)),
        *_check_hardware(config, cache, has_gpu=has_gpu),
        checks.check_threads(env, count_cores()),
        checks.check_bytecode(env),
        checks.check_model(model, env, has_hub_token=bool(tokens["HF_TOKEN"])),
        checks.check_tokens(tokens, MIN_TOKEN_CHARS),
    ]


def _check_hardware(config: RunConfig, cache: Path, *, has_gpu: bool) -> list[Finding]:
    memory = psutil.virtual_memory()
    output, cache = nearest_existing(config.output), nearest_existing(cache)
    clock, trouble = survey.survey_clock(output)
    addresses = server_addresses(config)
    shared = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return [
        checks.check_cpu(count_cores(), processor_flags(), has_gpu=has_gpu),
        checks.check_memory(memory.available, memory.total),
        checks.check_disk("disk for runs", str(output), shutil.disk_usage(output).free, trouble=trouble),
        checks.check_disk("disk for models", str(cache), shutil.disk_usage(cache).free),
        checks.check_shared_memory(str(SHARED_MEMORY), shared),
        checks.check_file_limit(*resource.getrlimit(resource.RLIMIT_NOFILE), HttpLimits().max_connections),
        *checks.check_ports({name: port for name, (_, port) in addresses.items()}, survey.owners_of_ports(addresses)),
        checks.check_clock(clock),
    ]


def _check_vllm(config: RunConfig, *, has_gpu: bool) -> list[Finding]:
    engine = config.engine
    vllm: Installation | None = None
    trouble = ""
    try:
        vllm = find_vllm(engine.vllm_python)
    except MissingExtra as error:
        trouble = error.message
    findings = [checks.check_vllm(vllm, trouble, is_wanted=requires_vllm(engine), has_gpu=has_gpu)]
    if vllm is not None:
        findings.append(checks.check_vllm_fit(survey.list_packages(vllm.python), vllm))
    return findings


def check_live(target: DoctorTarget, env: Mapping[str, str], report: Report = lambda _: None) -> list[Finding]:
    findings: list[Finding] = []
    hub_url, engine_url = target.hub_url, target.engine_url
    hub_token, engine_token = env.get(HUB_TOKEN, ""), env.get(ENGINE_TOKEN, "")
    if target.run_folder is not None:
        folder = target.run_folder.expanduser().resolve()
        check_is_run(folder)
        config = load_run(folder / CONFIG_FILE)
        findings.append(check_run(folder, config))
        if is_run_live(folder):
            # The tokens of the run are sent to its own servers, not to an address that the user gave.
            if not hub_url:
                hub_url = config.environments[0].hub_url
                hub_token = _token_of_run(config.hub.token_file, "observer", hub_token, findings)
            if not engine_url:
                engine_url = config.train.engine_url[0]  # of several, the first
                engine_token = _token_of_run(config.engine.token_file, "environment", engine_token, findings)
        report(f"reading the logs of {folder.name}")
        logs = sorted((folder / LOG_FOLDER).glob("*.log"))
        findings += check_logs({log.stem: tail_of(log, num_lines=NUM_LINES) for log in logs})
    if hub_url:
        report(f"asking the hub at {shown_url(hub_url)}")
        findings += check_hub(ServerProbe("hub", hub_url, hub_token, HUB_TOKEN))
    if engine_url:
        engine_url = engine_url.rstrip("/").removesuffix("/v1")  # as the clients of the engine do
        report(f"asking the engine at {shown_url(engine_url)}")
        findings += check_engine(ServerProbe("engine", engine_url, engine_token, ENGINE_TOKEN))
    return findings


def _token_of_run(file: Path | None, role: ClientRole, given: str, findings: list[Finding]) -> str:
    try:
        return client_token(file, role, given)
    except ConfigError as error:
        findings.append(Finding("tokens", "problem", error.message, error.fix))
        return given


def check_run(folder: Path, config: RunConfig) -> Finding:
    if is_run_live(folder):
        return Finding("run", "ok", f"{folder.name} is going on")
    summary = load_summary(folder)
    if summary is not None and summary.last_words:
        remedy = f"fix that; {resume_advice(config, folder, reader_of(config, folder).read().last_step)}"
        return Finding("run", "problem", f"{folder.name} was ended by: {summary.last_words.splitlines()[0]}", remedy)
    if summary is not None and (summary.alarms or summary.findings):
        return Finding(
            "run",
            "warning",
            f"{folder.name} is not going on; its last warning: {[*summary.alarms, *summary.findings][-1]}",
        )
    return Finding("run", "ok", f"{folder.name} is not going on: only its logs can be asked")
