"""Train and look at runs from Python: `treadle.train(...)` and `treadle.load(RUN)`.

`train` turns its arguments into the settings that `treadle run` takes, and starts the same launcher. Code and rows that
exist only in this process are written below `<output>/inputs`, where the processes of the run find them, also when the
run is resumed.
"""

from __future__ import annotations

import inspect
import io
import os
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from treadle.background import PARENT_VARIABLE
from treadle.config import RunConfig
from treadle.config.load import dotted_keys, load_run
from treadle.errors import ConfigError, ModelError, UserError, require
from treadle.log import show_warnings

if TYPE_CHECKING:
    from treadle.envs.base import Environment
    from treadle.envs.rewards import RewardLike
    from treadle.launch.notebook_inputs import Data
    from treadle.report.history import Evaluation, History
    from treadle.report.summary import Summary
    from treadle.store.browse import Browser
    from treadle.wire.groups import ScoredGroup

Message = Mapping[str, Any]  # {"role": "user", "content": "..."}
SOURCE = "treadle.train()"
_MOST_REQUESTS = 16  # at once, of one `generate`


def train(
    model: str | os.PathLike[str] | None = None,
    env: str | os.PathLike[str] | type[Environment] | Mapping[str, Any] | None = None,
    rewards: Sequence[RewardLike] = (),
    data: Data | None = None,
    *,
    steps: int | None = None,
    eval_data: Data | None = None,
    reward_weights: Sequence[float] | None = None,
    config: str | os.PathLike[str] | None = None,
    plain: bool = False,
    **settings: Any,
) -> Run:
    """Train a model and return the finished run. Ctrl-C, or the interrupt of a notebook, saves a checkpoint, stops all
    processes and raises KeyboardInterrupt.

    model           a Hugging Face id, or a folder; absent: the built-in default
    env             a built-in environment, the path of a .py file, or a class; absent: the rows of `data`
    rewards         functions (also of a notebook cell, also in TRL's style), names of built-in rewards, or rewards
    data            list of dicts, datasets.Dataset, {"train": rows, "test": rows}, a path, or the id of a dataset
    eval_data       held-out rows, in the same forms
    reward_weights  one for each reward
    config          a file of settings (TOML, YAML, or the config.json of a run); arguments win over it
    plain           plain lines instead of the live view
    settings        any setting, by its name: learning_rate=1e-5, group_size=8, train={"batch_size": 32}

    run = treadle.train("Qwen/Qwen3-0.6B", rewards=[is_short], data=rows, steps=100)
    """
    if PARENT_VARIABLE in os.environ:
        raise ConfigError(
            "treadle.train() was called while a process of a run imported this file",
            fix='put the call under: if __name__ == "__main__":',
        )
    given = dict(settings)
    for name, value in (("steps", steps), ("model", None if model is None else os.fspath(model))):
        if value is not None:
            given[name] = value
    if isinstance(env, Mapping):
        given["env"] = env
    elif isinstance(env, str | os.PathLike):
        given["env.name"] = os.fspath(env)
    file = None if config is None else Path(config)
    overrides = dotted_keys(given)
    # Mistakes are refused before files are written.
    asked = load_run(file, overrides, with_derived=False, source=SOURCE)
    is_given = {"env": inspect.isclass(env) or "env.name" in overrides, "rewards": bool(rewards)}
    is_given |= {"data": data is not None, "eval_data": eval_data is not None}
    for_one = [f"{name}=" for name in is_given if is_given[name]]
    if asked.envs and for_one:
        raise ConfigError(
            f"{for_one[0]} is for one environment, and {file.name if file else 'envs='} has {len(asked.envs)}",
            fix="set it in the [[env]] tables",
        )
    from treadle.launch.notebook_inputs import NotebookInputs

    inputs = NotebookInputs(asked.output.expanduser() / "inputs")
    if inspect.isclass(env):
        overrides["env.name"] = inputs.add_environment(env)
    elif data is not None and "name" not in asked.env.model_fields_set:
        overrides["env.name"] = "jsonl"
    if rewards:
        overrides["env.rewards"] = inputs.add_rewards(rewards, reward_weights)
    elif reward_weights is not None:
        raise ConfigError("reward_weights without rewards", fix="give rewards=[...], one for each weight")
    for key, rows in (("data", data), ("eval_data", eval_data)):
        if rows is not None:
            overrides[f"env.{key}"] = inputs.add_data(rows, key)
    return _supervise(load_run(file, overrides, with_derived=False, source=SOURCE), plain=plain)


def load(run: str | os.PathLike[str] | None = None) -> Run:
    """The run in this folder, finished or not; absent: the newest in ./runs."""
    from treadle.launch.folder import newest_run
    from treadle.report.history import check_is_run

    folder = newest_run(Path("runs")) if run is None else Path(run)
    folder = folder.expanduser().resolve()
    check_is_run(folder)
    return Run(folder)


@dataclass(frozen=True)
class RolloutGroup:
    """The completions of one prompt, and what they were worth."""

    step: int | None  # that trained on it; None: none did yet
    prompt: str
    completions: list[str]  # of a rollout of several turns, the last reply
    scores: list[float]
    parts: list[dict[str, float]]  # what each reward gave, by its name
    messages: list[list[Message]]  # the whole conversation of each rollout


class Plot:
    """A picture that a notebook shows. `figure` is matplotlib's."""

    def __init__(self, figure: Any) -> None:
        self.figure = figure

    def save(self, path: str | os.PathLike[str]) -> None:
        """As .png, .svg or .pdf, by the end of the name."""
        self.figure.savefig(os.fspath(path))

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.figure.savefig(picture, format="png")
        return picture.getvalue()


class Run:
    """A run, by its folder. What it wrote is read whenever it is asked for, also while the run goes on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        from treadle.formatting import near
        from treadle.report.summary import result_in_words

        summary = self.summary
        state = "" if summary.is_complete else f" ({summary.steps} planned)"
        return f"<Run {near(self.path)}: {result_in_words(summary)}{state}>"

    @property
    def config(self) -> RunConfig:
        """Every setting, as the run used it: `run.config.train.lr`."""
        from treadle.launch.process_plan import CONFIG_FILE

        return load_run(self.path / CONFIG_FILE)

    @property
    def summary(self) -> Summary:
        """What summary.json holds: steps, held-out accuracy before and after, times, memory."""
        from treadle.report.summary import read_record

        return read_record(self.path).summary

    @property
    def is_complete(self) -> bool:
        return self.summary.is_complete

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """A dict for each step: `pandas.DataFrame(run.metrics)`. docs/metrics.md lists the names."""
        return [dict(step) for step in self._history.steps]

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """Held-out accuracy with its interval, at step 0 and later."""
        return self._history.evaluations

    @property
    def model_path(self) -> Path:
        """The folder of the trained model, or of the adapter of a LoRA run."""
        from treadle.launch.folder import result_of

        return result_of(self.path)

    def rollouts(self, step: int | None = None, *, limit: int = 100) -> list[RolloutGroup]:
        """The groups of a step, or of all steps; the newest first, at most `limit`."""
        from treadle.dash.rollouts import open_group
        from treadle.store.browse import MAX_BATCHES_AT_ONCE, GroupFilter

        with self._open_queue() as browser:
            for _ in range(self._history.last_step // MAX_BATCHES_AT_ONCE):  # `open` reads the first ones
                browser.learn(0)
            found = browser.find(GroupFilter(step=step), limit)
            stored = browser.contents([group.id for group in found])
        return [_as_group(open_group(stored[group.id]), group.step) for group in found if group.id in stored]

    def plot(self) -> Plot:
        """Reward and accuracy by step, with the held-out accuracy."""
        from treadle.report.summary import title_of
        from treadle.track.plot import draw_reward

        points = [evaluation.point for evaluation in self._history.evaluations]
        return Plot(draw_reward(self._history.steps, points, title=title_of(self.summary)))

    def report(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Write what the run achieved into one HTML file, and return its path; absent: report.html in the folder."""
        from treadle.report.page import PAGE_FILE, write_report

        file = self.path / PAGE_FILE if path is None else Path(path)
        write_report(self.path, file)
        return file

    def export(self, folder: str | os.PathLike[str]) -> Path:
        """Write the trained model, with adapters merged in, to a new folder."""
        require("train", "torch", "transformers")
        from treadle.export import export_merged

        target = Path(folder).expanduser().resolve()
        export_merged(self.path, target)
        return target

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
        self, prompt: str, *, temperature: float = ..., max_tokens: int = ...
    ) -> str: ...
    @overload
    def generate(self, prompt: Sequence[str], *, temperature: float = ..., max_tokens: int = ...) -> list[str]: ...
    def generate(
        self, prompt: str | Sequence[str], *, temperature: float = 0.0, max_tokens: int = 256
    ) -> str | list[str]:
        """What the trained model answers to a question, or to each of several.

        Starts an engine for this one call; `chat` keeps one.
        """
        prompts = [prompt] if isinstance(prompt, str) else prompt
        with self.chat(temperature=temperature, max_tokens=max_tokens) as chat:
            answers = chat.answer([[{"role": "user", "content": text}] for text in prompts])
        return answers[0] if isinstance(prompt, str) else answers

    def chat(self, *, temperature: float = 0.0, max_tokens: int = 256) -> ModelChat:
        """Start an engine with the trained model, and talk to it."""
        return ModelChat(self.model_path, temperature=temperature, max_tokens=max_tokens)

    def resume(self, *, plain: bool = False, **settings: Any) -> Run:
        """Continue a run that was stopped, or that is to take more steps: `run.resume(steps=80)`."""
        return _supervise(self.path, dotted_keys(settings), plain=plain)

    @property
    def _history(self) -> History:
        from treadle.report.history import reader_of

        return reader_of(self.config, self.path).read()

    def _open_queue(self) -> Browser:
        """Its rollouts; the run may have moved with their file."""
        from treadle.store.choice import open_recorded, queue_file, shown_queue

        hub = self.config.hub
        if self.config.hub_url or not (hub.store or queue_file(hub, self.path)):
            place = self.config.hub_url or shown_queue(hub)
            raise UserError(f"the rollouts of this run are not here: {place}", fix="look at them on the hub's page")
        return open_recorded(hub, self.path)


class ModelChat:
    """A conversation with a model. Its engine runs until `close()`, the end of a `with`, or of this process.

    with run.chat() as chat:
        chat.ask("What is the capital of Peru?")
        chat.ask("And how large is it?")
    """

    def __init__(self, model_path: Path, *, temperature: float, max_tokens: int) -> None:
        require("train", "torch", "transformers")
        from treadle.envs.chat_format import ChatTokenizer
        from treadle.launch.chat_command import ChatSession, running_engine
        from treadle.launch.supervisor import Stopped

        self.messages: list[dict[str, str]] = []
        tokenizer, opened = ChatTokenizer.load(model_path), ExitStack()
        try:
            url = opened.enter_context(running_engine(model_path))
        except Stopped:
            raise KeyboardInterrupt from None
        self._partner = ChatSession(url, tokenizer, temperature, max_tokens)
        self.close = weakref.finalize(self, opened.close)

    def __enter__(self) -> ModelChat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, text: str) -> str:
        """The answer. `messages` keeps question and answer; empty it to begin another conversation."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = self._partner.answer(asked)
        self.messages = [*asked, {"role": "assistant", "content": answer}]
        return answer

    def answer(self, conversations: Sequence[Sequence[Message]]) -> list[str]:
        """The answer to each of these conversations, generated side by side."""
        asked = [[dict(message) for message in messages] for messages in conversations]
        with ThreadPoolExecutor(_MOST_REQUESTS) as threads:
            return list(threads.map(self._partner.answer, asked))


def _supervise(what: RunConfig | Path, overrides: dict[str, Any] | None = None, *, plain: bool) -> Run:
    """Start a run, or resume the one in a folder, and wait for its end."""
    from treadle.formatting import near
    from treadle.launch.job import resume_run, start_run

    show_warnings()
    try:
        if isinstance(what, Path):
            summary = resume_run(what, overrides or {}, plain=plain)
        else:
            summary = start_run(what, plain=plain)
    except SystemExit as end:  # of the process that fetches the model, which has printed why
        problem = f"the model could not be prepared (exit code {end.code})"
        raise ModelError(problem, fix="see the message above") from None
    if not summary.is_complete:
        raise KeyboardInterrupt(f'stopped; continue with: treadle.load("{near(summary.run)}").resume()')
    return Run(Path(summary.run))


def _as_group(group: ScoredGroup, step: int | None) -> RolloutGroup:
    conversations: list[list[Message]] = [list(said) for said in group.messages or ()]
    said = conversations[0] if conversations else []
    first_reply = next((place for place, one in enumerate(said) if one.get("role") == "assistant"), len(said))
    return RolloutGroup(
        step=step,
        prompt="\n".join(str(message.get("content", "")) for message in said[:first_reply]),
        completions=[str(one[-1].get("content", "")) if one else "" for one in conversations],
        scores=list(group.scores),
        parts=[dict(noted.get("parts", {})) for noted in group.overrides or [{}] * group.size],
        messages=conversations,
    )
