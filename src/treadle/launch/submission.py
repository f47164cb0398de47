"""Hand a run to a scheduler that starts its launcher later: check what can be checked now, then submit or print."""

from __future__ import annotations

import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from treadle.config.files import secrets_in
from treadle.config.schema import RunConfig
from treadle.config.values import explicit_keys, with_fitting_groups, with_values
from treadle.errors import ConfigError, Problems
from treadle.gpus import Gpu
from treadle.launch import kuberay, slurm
from treadle.launch.folder import requested_keys
from treadle.launch.machine import MachineFacts, count_cores
from treadle.launch.machines import (
    Machine,
    facts_on,
    gpus_of_each,
    names_by_machine,
    place_processes,
    settings_for,
)
from treadle.launch.places import check_scheduler
from treadle.launch.preflight import run_label, settle_environments
from treadle.launch.process_plan import RunPlan, build_plan, engines_of_machine, server_addresses

SUBMITTED = ("slurm", "k8s")
_ONLY_HERE = ("--dry-run", "--open", "--plain")  # there is no terminal and no browser


def submit_run(
    config: RunConfig, words: Sequence[str], given: Mapping[str, object], *, is_dry: bool, run_folder: Path | None
) -> None:
    """Submit a run; `is_dry`: only print what would be submitted. `words`: of the command line after `treadle run`;
    `given`: its flags; `run_folder`: of a run that is resumed."""
    scheduler = config.cluster.scheduler
    if scheduler not in SUBMITTED:
        raise ConfigError("--dry-run prints what is handed to a scheduler", fix="add --on slurm or --on k8s")
    if scheduler == "k8s" and not is_dry:
        raise ConfigError(
            "treadle prints the manifest of a run, and applies none", fix="--dry-run | kubectl apply -f -"
        )
    check_scheduler(config)
    refuse_secrets(config, given)
    plan = plan_on(config, explicit_keys(config) if run_folder is None else requested_keys(run_folder) | given.keys())
    places, label = names_by_machine(plan.processes, config.cluster.nodes), run_label(config)
    if scheduler == "k8s":
        job_id = secrets.token_hex(3)  # kubectl would take a manifest with a known name for a change of that job
        print(kuberay.manifest(config, words_inside(words), label=label, job_id=job_id, plan=places), end="")
        return
    text = slurm.batch_file(
        config, words_inside(words), label=label, plan=places, folder=Path.cwd(), python=sys.executable
    )
    if is_dry:
        print(text, end="")
    else:
        slurm.submit(text, config.output.expanduser())


def plan_on(config: RunConfig, explicit: frozenset[str]) -> RunPlan:
    """The plan of a run on machines that are not known yet: `cluster` describes them."""
    problems = Problems()
    config = settle_environments(config, problems)
    problems.raise_all()
    config = with_fitting_groups(config, explicit)
    machines = [Machine(f"machine {number}") for number in range(config.cluster.nodes)]
    placed = settings_for(config, explicit, machines)
    config = with_values(config, placed)
    config.check_together()
    num_gpus = gpus_of_each(config)
    gpus = tuple(Gpu("", 0) for _ in range(num_gpus))
    facts = MachineFacts(
        config.cluster.cpus_per_node or count_cores(),
        has_shared_memory=True,
        has_gpu=num_gpus > 0,
        ports={server: port for server, (_, port) in server_addresses(config).items()},
        gpus=gpus,
    )
    facts = facts_on(facts, config, machines)
    folder = config.output.expanduser().absolute() / "RUN"
    plan = build_plan(
        config,
        facts,
        run_folder=folder,
        model_folder=config.model,
        is_model_local=False,
        explicit=explicit | placed.keys(),
    )
    return replace(plan, processes=place_processes(plan.processes, machines, engines_of_machine(plan.config, facts)))


def words_inside(words: Sequence[str]) -> list[str]:
    """The command line of the launcher on the cluster."""
    return [*(word for word in words if word.replace("_", "-") not in _ONLY_HERE), "--plain"]


def refuse_secrets(config: RunConfig, given: Mapping[str, object]) -> None:
    """A batch file or a manifest is copied by the scheduler, and may be read by others."""
    secret = sorted(secrets_in(config.model_dump(mode="json")).keys() & given.keys())
    if secret:
        flags = ", ".join("--" + key.replace("_", "-") for key in secret)
        raise ConfigError(
            f"{flags} would stand in what is submitted", fix="put it into a file that only you can read: --config FILE"
        )
