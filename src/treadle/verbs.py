"""What each verb of the command line does. Each imports what it needs when it is called, so that --help is fast."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle.errors import ConfigError

if TYPE_CHECKING:
    from treadle.config import RunConfig
    from treadle.config.flags import FlagParser

NEWEST_RUN = object()  # --resume without a folder
_CONFIG_HELP = "settings: TOML, YAML, or the config.json of a run; flags win over it"
ENV_ACTIONS = ("serve", "process", "evaluate", "validate")


def _run(words: list[str]) -> int:
    from treadle.config.flags import add_run_flags, given
    from treadle.config.load import load_run

    parser = _parser("run")
    parser.add_argument(
        "--resume", dest="_resume", nargs="?", const=NEWEST_RUN, type=Path, metavar="RUN",
        help="continue the run in this folder, or without one the newest run in --output",
    )  # fmt: skip
    parser.add_argument("--plain", dest="_plain", action="store_true", help="plain lines instead of the live view")
    parser.add_argument("--open", dest="_open", action="store_true", help="open the run's page in the browser")
    parser.add_argument("--fit", dest="_fit", action="store_true", help="apply treadle plan's first remedy if needed")
    parser.add_argument(
        "--dry-run",
        dest="_dry_run",
        action="store_true",
        help="with --on slurm or k8s: print the batch file or the manifest, and end",
    )
    add_run_flags(parser, words)
    values = parser.parse_args(words)
    _log_to_stderr("WARNING")
    from treadle.budget.command import fit_run
    from treadle.launch import Submission, resume, start
    from treadle.launch.folder import newest_run

    flags = given(values)
    how: dict[str, Any] = {"plain": values._plain, "open_page": values._open}

    def load(settings: Mapping[str, str]) -> RunConfig:
        return load_run(values._config, {**flags, **settings}, with_derived=False)

    how["submission"] = Submission(words, flags, values._dry_run)
    if values._resume is None:
        return start(fit_run(load, print) if values._fit else load({}), **how)
    if values._fit:
        raise ConfigError("a run keeps its settings; --resume cannot be with --fit", fix="start a new run with --fit")
    if values._resume is not NEWEST_RUN:
        return resume(values._resume, flags, **how)
    named = {"output": flags.pop("output")} if "output" in flags else {}
    folder = newest_run(load_run(values._config, named, with_derived=False).output)
    named_words = [*(word for word in words if word != "--resume"), "--resume", str(folder)]
    how["submission"] = Submission(named_words, flags, values._dry_run)
    return resume(folder, flags, **how)


def _sft(words: list[str]) -> int:
    from treadle.config.flags import add_flags, given
    from treadle.config.load import load_run
    from treadle.config.schema import RunConfig
    from treadle.config.sft import DEFAULTS_IN_WORDS, SftConfig
    from treadle.config.train import TrainConfig

    words = [f"--{word.removeprefix('--sft.')}" if word.startswith("--sft.") else word for word in words]
    parser = _parser("sft")
    parser.add_argument("--resume", dest="_resume", type=Path, metavar="RUN", help="continue the run in this folder")
    add_flags(parser, SftConfig, prefix="sft.")
    own = ("model", "steps", "seed", "output", "max_restarts")
    add_flags(parser, RunConfig, only=own, defaults=DEFAULTS_IN_WORDS)
    add_flags(parser, TrainConfig, prefix="train.", dotted=True, defaults=DEFAULTS_IN_WORDS)
    values = parser.parse_args(words)
    _log_to_stderr("WARNING")
    from treadle.errors import require

    require("train", "torch", "transformers")
    from treadle.sft.command import resume, start

    if values._resume is not None:
        return resume(values._resume, given(values))
    return start(load_run(values._config, given(values), with_derived=False, is_supervised=True))


def _matrix(words: list[str]) -> int:
    from treadle.config.flags import add_run_flags, given

    parser = _parser("matrix")
    parser.add_argument("--modes", dest="_modes", metavar="NAMES", help="comma-separated modes to run (default: all)")
    parser.add_argument("--resume", dest="_resume", type=Path, metavar="FOLDER", help="continue this matrix")
    parser.add_argument("--plain", dest="_plain", action="store_true", help="plain lines instead of the live view")
    add_run_flags(parser, words)
    engine_help = "the same as --engine.engine"
    parser.add_argument("--engine", dest="engine.engine", default=argparse.SUPPRESS, metavar="NAME", help=engine_help)
    values = parser.parse_args(words)
    _log_to_stderr("WARNING")
    from treadle.launch.folder import REQUEST_FILE
    from treadle.launch.matrix import load_settings, parse_modes, resume_matrix, start_matrix

    file = values._config
    if file is None and values._resume is not None:  # flags such as --envs.1.args need the environments in it
        file = next(iter(values._resume.expanduser().glob(REQUEST_FILE)), None)
    config = load_settings(file, given(values))
    modes = None if values._modes is None else parse_modes(values._modes)
    if values._resume is not None:
        return resume_matrix(values._resume, config, modes, plain=values._plain)
    return start_matrix(config, modes or parse_modes("all"), plain=values._plain)


def _plan(words: list[str]) -> int:
    from treadle.budget.command import plan_memory
    from treadle.budget.request import add_plan_flags
    from treadle.config.flags import add_run_flags, given
    from treadle.config.load import load_run

    parser = _parser("plan")
    add_plan_flags(parser)
    add_run_flags(parser, words)
    values = parser.parse_args(words)
    return plan_memory(load_run(values._config, given(values), with_derived=False), values)


def _hub(words: list[str]) -> int:
    run = _one_section("hub", words)
    from treadle.dash.routes import open_pages
    from treadle.hub.process import serve

    serve(run.hub, pages=partial(open_pages, run.hub.run_folder))
    return 0


def _engine(words: list[str]) -> int:
    from treadle.config.schema import has_vllm

    parser = _section_parser("engine")
    values, unknown = parser.parse_known(words)
    run = _load_section("engine", values)
    if unknown and has_vllm(run.engine):  # vLLM has some hundred flags, and checks them itself
        further = shlex.join([*shlex.split(run.engine.vllm_args), *unknown])
        run = run.model_copy(update={"engine": run.engine.model_copy(update={"vllm_args": further})})
    else:
        parser.refuse(unknown)
    from treadle.engines import serve
    from treadle.gpus import use_gpus
    from treadle.launch.folder import is_run, result_of

    run.engine.check_alone()
    use_gpus(run.engine.gpus)
    folder = Path(run.engine.model).expanduser()
    serve(run.engine.model_copy(update={"model": str(result_of(folder))}) if is_run(folder) else run.engine)
    return 0


def _router(words: list[str]) -> int:
    run = _one_section("router", words)
    from treadle.router.process import serve

    serve(run.router)
    return 0


def _train(words: list[str]) -> int:
    from treadle.config.atropos import drop_without_effect

    words, notes = drop_without_effect(words, "train")
    sys.stderr.writelines(f"treadle train: {note}\n" for note in notes)
    values = _section_parser("train").parse_args(words)
    run = _load_section("train", values)
    from treadle.gpus import use_gpus
    from treadle.train import main as train

    gpus = run.train.gpus or ()
    if len(gpus) > 1 and run.train.ranks == 1 and "WORLD_SIZE" not in os.environ:
        raise ConfigError(
            f"--gpus names {len(gpus)} GPUs, and this is one trainer process, which uses one",
            fix=f"torchrun --nproc-per-node {len(gpus)} -m treadle train ... starts one for each; so does treadle run",
        )
    use_gpus(run.train.gpus)
    if run.is_supervised:  # a process of treadle sft, with the settings of its run
        from treadle.sft.trainer import train_on_rows

        train_on_rows(run, values._config.parent)
    else:
        train(run.train)
    return 0


def _env(words: list[str]) -> int:
    from treadle.config.atropos import drop_without_effect
    from treadle.config.env import EnvConfig, ServerConfig
    from treadle.config.flags import add_flags, given
    from treadle.config.load import load_process

    words, notes = drop_without_effect(words)
    sys.stderr.writelines(f"treadle env: {note}\n" for note in notes)
    parser = _parser("env")
    parser.add_argument("_name", metavar="NAME", help="a built-in environment, for example arithmetic, or a .py file")
    parser.add_argument("_action", metavar="ACTION", nargs="?", choices=ENV_ACTIONS, help=", ".join(ENV_ACTIONS))
    parser.add_argument("--verbose", dest="_verbose", action="store_true", help="validate: list what is ok too")
    add_flags(parser, EnvConfig, prefix="env.", dotted=True)
    add_flags(parser, ServerConfig, prefix="openai.", dotted=True)
    values, rest = parser.parse_known(words)
    if values._action is None:  # argparse finds an optional positional only before the flags
        values._action, rest = (rest[0], rest[1:]) if rest and rest[0] in ENV_ACTIONS else ("serve", rest)
    parser.refuse(rest)
    flags = {key: value for key, value in given(values).items() if key != "env.name"}
    run = load_process(values._config, {**flags, "env": [values._name]}, "env", "openai")
    _log_to_stderr()
    from treadle import envs

    return envs.run_action(values._action, run.env, run.openai, verbose=values._verbose)


def _top(words: list[str]) -> int:
    parser = _parser("top", "Watch a live run: its steps and figures, its processes, and what they wait for.")
    parser.add_argument("run", nargs="?", type=Path, help="its folder; absent: the newest run in ./runs")
    parser.add_argument("--plain", action="store_true", help="plain lines instead of the live view")
    parser.add_argument("--once", action="store_true", help="show one picture and end")
    values = parser.parse_args(words)
    from treadle.launch.top import watch_run

    return watch_run(values.run, plain=values.plain, once=values.once)


def _dash(words: list[str]) -> int:
    parser = _parser("dash", "Open the page of a run, live or finished, or of a folder of runs.")
    run_help = "folder of a run or of runs; absent: the newest run in ./runs"
    parser.add_argument("run", nargs="?", type=Path, metavar="RUN", help=run_help)
    parser.add_argument("--no-open", action="store_true", help="print the address and open no browser")
    values = parser.parse_args(words)
    _log_to_stderr("WARNING")
    from treadle.launch.dash_command import show_page

    return show_page(values.run, opens=not values.no_open)


def _chat(words: list[str]) -> int:
    parser = _parser("chat", "Talk to a model or to the result of a run.")
    parser.add_argument("model", nargs="?", help="a run or model folder, or an id; absent: the newest run in ./runs")
    parser.add_argument("--message", "-m", help="ask this one question and end")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 always takes the likeliest token")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest answer, in tokens")
    values = parser.parse_args(words)
    from treadle.launch.chat_command import talk

    return talk(values.model, message=values.message, temperature=values.temperature, max_tokens=values.max_tokens)


def _doctor(words: list[str]) -> int:
    from treadle.config.flags import add_run_flags, given
    from treadle.config.load import load_run

    parser = _parser("doctor")
    parser.add_argument("_run", nargs="?", type=Path, metavar="RUN", help="folder of a run: its processes and its logs")
    parser.add_argument("--hub", dest="_hub", default="", metavar="URL", help="a hub that serves now")
    parser.add_argument("--engine", dest="_engine", default="", metavar="URL", help="an engine that serves now")
    parser.add_argument("--json", dest="_json", action="store_true", help="one JSON object, for programs")
    parser.add_argument("--verbose", dest="_verbose", action="store_true", help="list what is ok too")
    add_run_flags(parser, words)
    values = parser.parse_args(words)
    from treadle.doctor.command import DoctorTarget, diagnose

    target = DoctorTarget(values._run, values._hub, values._engine)
    config = load_run(values._config, given(values), with_derived=False)
    return diagnose(config, target, is_json=values._json, verbose=values._verbose)


def _report(words: list[str]) -> int:
    parser = _parser("report", "Write what a run achieved into one HTML file.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of the run; it need not be finished")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to; absent: report.html in the run's folder")
    values = parser.parse_args(words)
    from treadle.report.page import write_report

    return write_report(values.run, values.out)


def _compare(words: list[str]) -> int:
    parser = _parser("compare", "Put runs side by side; those that differ only by seed are grouped.")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folders of two runs or more")
    out_help = "page with the curves; absent: comparison.html beside the first run"
    parser.add_argument("--out", type=Path, metavar="FILE", help=out_help)
    json_help = "one JSON object, for programs; the page is written only with --out"
    parser.add_argument("--json", action="store_true", help=json_help)
    values = parser.parse_args(words)
    from treadle.report.comparison_output import write_comparison

    return write_comparison(values.runs, values.out, is_json=values.json)


def _export(words: list[str]) -> int:
    parser = _parser("export", "Write what a run has trained, adapters merged in.")
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a finished run, of an adapter, or of a model")
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument("--merged", type=Path, metavar="DIR", help="new folder for the whole model in safetensors")
    how.add_argument("--gguf", type=Path, metavar="FILE", help="new GGUF file, for llama.cpp (Llama, Qwen2, Qwen3)")
    how.add_argument("--push", metavar="NAME", help="repository of the Hugging Face Hub; a new one is private")
    values = parser.parse_args(words)
    from treadle.errors import require

    require("train", "torch", "transformers")
    from treadle import export

    source = values.run.expanduser()
    if values.push is not None:
        print(export.push(source, values.push))
        return 0
    target = (values.merged or values.gguf).expanduser().resolve()
    (export.export_gguf if values.merged is None else export.export_merged)(source, target)
    print(target)
    return 0


def _token(words: list[str]) -> int:
    from treadle.net.access_tokens import CLIENT_ROLES, HUB_TOKEN_VARIABLE, read_secret, role_token

    parser = _parser("token", "Print the token of a role, for clients of a hub or engine.")
    parser.add_argument("role", choices=CLIENT_ROLES, help=", ".join(CLIENT_ROLES))
    file_help = f"token file of the server; absent: ${HUB_TOKEN_VARIABLE}"
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=file_help)
    values = parser.parse_args(words)
    if values.token_file is not None and not values.token_file.expanduser().exists():
        return complain(f"there is no file {values.token_file}: the server makes it when it is started with it")
    environment = os.environ if values.token_file is None else {}  # the file may be an engine's
    secret = read_secret("hub", values.token_file, "--token-file", environment, HUB_TOKEN_VARIABLE)
    if secret is None:
        return complain(f"the token of a role comes from the server's: give --token-file, or set {HUB_TOKEN_VARIABLE}")
    print(role_token(secret, values.role))
    return 0


HANDLERS: dict[str, Callable[[list[str]], int]] = {
    "run": _run, "sft": _sft, "matrix": _matrix, "plan": _plan,
    "hub": _hub, "engine": _engine, "router": _router, "env": _env, "train": _train,
    "chat": _chat, "export": _export, "dash": _dash, "top": _top,
    "doctor": _doctor, "report": _report, "compare": _compare, "token": _token,
}  # fmt: skip


def _one_section(name: str, words: list[str]) -> Any:
    """The configuration of one process, from its plain flags; `--config` may name a file that holds a whole run."""
    return _load_section(name, _section_parser(name).parse_args(words))


def _parser(verb: str, description: str = "") -> FlagParser:
    """A parser with this description; without one, with the guide of the verb and --config."""
    from treadle.config.flags import FlagParser
    from treadle.help_texts import GUIDES

    if description:
        return FlagParser(prog=f"treadle {verb}", description=description)
    parser = FlagParser(prog=f"treadle {verb}", guide=GUIDES[verb])
    parser.add_argument("--config", dest="_config", type=Path, metavar="FILE", help=_CONFIG_HELP)
    return parser


def _section_parser(name: str) -> FlagParser:
    from treadle.config.flags import add_flags
    from treadle.config.schema import RunConfig

    parser = _parser(name)
    add_flags(parser, type(RunConfig.model_fields[name].default), prefix=f"{name}.")
    return parser


def _load_section(name: str, values: Any) -> Any:
    from treadle.config.flags import given
    from treadle.config.load import load_process

    _log_to_stderr()
    return load_process(values._config, given(values), name)


def _log_to_stderr(level: str = "INFO") -> None:
    from treadle.log import set_up_logging

    set_up_logging(os.environ.get("TREADLE_LOG", level))


def complain(message: str, code: int = 2) -> int:
    sys.stderr.write(f"treadle: {message}\n")
    return code
