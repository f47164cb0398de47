"""The command line: find the verb, call its function (verbs.py), and print an error as one sentence."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence

from treadle import __version__
from treadle.errors import ProcessDied, TreadleError, as_path_error, as_user_error
from treadle.verbs import HANDLERS, complain

VERBS = {
    "run": "train a model: start every process, watch them, and report what was learned",
    "sft": "train a model on rows, or on the best completions of a run, before or without treadle run",
    "matrix": "run the weight modes one after another, and compare them in one table and one plot",
    "plan": "say how much memory a run would take, whether it fits, and what would make it fit",
    "hub": "serve the rollout API (also installed as run-api)",
    "engine": "serve a model",
    "router": "serve one address for several engines",
    "env": "run an environment: treadle env NAME [serve|process|evaluate|validate]",
    "train": "run the trainer",
    "dash": "open the page of a run, or of a folder of runs",
    "top": "watch a live run: steps, figures, processes, and what they wait for",
    "chat": "talk to a model or to the result of a run",
    "export": "write the result of a run as a model folder or a GGUF file, or push it to the Hugging Face Hub",
    "doctor": "check this machine or a live run, and say what is wrong and how to fix it",
    "report": "write what a run achieved into one HTML file",
    "compare": "put runs side by side: figures, settings and answers that differ, curves over seeds",
    "token": "print the token of a role, for clients of a hub or an engine that asks for one",
}


def main(argv: Sequence[str] | None = None) -> None:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_overview())
        return
    if words[0] in ("-V", "--version"):
        print(f"treadle {__version__}")
        return
    verb, rest = words[0], words[1:]
    if verb not in HANDLERS:
        from treadle.config.load import suggest

        sys.exit(complain(f"unknown verb '{verb}'; {suggest(verb, VERBS) or 'see treadle --help'}"))
    from treadle.background import end_with_parent
    from treadle.watch.stacks import listen_for_signal

    listen_for_signal()
    end_with_parent()
    try:
        sys.exit(HANDLERS[verb](rest))
    except TreadleError as error:
        sys.exit(complain(_with_flags_of(verb, error, rest), error.exit_code))
    except BrokenPipeError:  # the reader of the output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, RuntimeError) as error:
        user_error = as_user_error(error) or as_path_error(error)
        if user_error is None:
            raise
        sys.exit(complain(_with_flags_of(verb, user_error, rest), user_error.exit_code))
    except KeyboardInterrupt:
        sys.exit(130)


def run_api() -> None:
    """The command `run-api`, the name of the hub in Atropos; --reload is accepted and ignored."""
    words = [word for word in sys.argv[1:] if word != "--reload"]
    if len(words) < len(sys.argv) - 1:
        sys.stderr.write("run-api: --reload has no effect: this hub watches no files\n")
    main(["hub", *words])


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"treadle {__version__}: GRPO post-training for language models", ""]
    for verb, text in VERBS.items():
        first, *more = textwrap.wrap(text, max(60, shutil.get_terminal_size().columns) - width - 5)
        lines += [f"  {verb:<{width}}  {first}", *(f"  {'':<{width}}  {line}" for line in more)]
    return "\n".join([*lines, "", "treadle VERB --help says more."])


def _with_flags_of(verb: str, error: TreadleError, words: list[str]) -> str:
    """The error message, with flags as the user typed them; those of `run` in a process that the launcher started."""
    from treadle.background import PARENT_VARIABLE
    from treadle.config.flag_spelling import VERB_OF_SECTION, respell_flags

    if isinstance(error, ProcessDied):  # it quotes the end of a log
        return str(error)
    section = verb if verb in VERB_OF_SECTION else ""
    return respell_flags("run" if PARENT_VARIABLE in os.environ else verb, str(error), section, typed=words)
