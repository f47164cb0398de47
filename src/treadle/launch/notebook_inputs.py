"""Write code and rows that exist only in this process to files, where the processes of a run find them.

<output>/inputs/<hash of the content>/rewards.py   functions and classes of a script or a notebook
                                      my_task.py   an environment
                                      rows.jsonl   rows; of several splits train.jsonl, test.jsonl, ...
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from treadle.config.load import replace_text
from treadle.envs.base import Environment
from treadle.envs.copied_source import CopiedSource
from treadle.envs.rewards import CombinedReward, FunctionReward, Reward, RewardLike
from treadle.envs.rewards.base import registered_name
from treadle.envs.rewards.combined import leaves
from treadle.errors import ConfigError

Rows = Iterable[Mapping[str, Any]]  # a list of dicts, a datasets.Dataset
Data = str | os.PathLike[str] | Rows | Mapping[str, Rows]


class NotebookInputs:
    """`folder` is created when something is written. The same content is written once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.absolute()

    def add_environment(self, kind: type[Any]) -> str:
        """The value of `--env.name` for a class."""
        if not issubclass(kind, Environment):
            raise ConfigError(f"{kind.__name__} is no Environment", fix="derive it from treadle.envs.Environment")
        source = CopiedSource()
        cls, name = source.add(kind), registered_name(kind.__name__)
        # Another version of the class may have the name in its decorator; a name with a hash is unique.
        label = f"{name}-{_hash_of(source.text)}"
        source.append(
            "from treadle.envs import environment as _environment\n\n\n"
            # Under another name, because methods may use that of the class: super(Name, self).
            f"@_environment({label!r})\nclass _RegisteredByTreadle({cls}):\n    pass\n\n\n"
            f"_RegisteredByTreadle.__name__ = {cls!r}"
        )
        return f"{self._write(f'{name}.py', source.text)}:{label}"

    def add_rewards(self, rewards: Sequence[RewardLike], weights: Sequence[float] | None) -> tuple[dict[str, Any], ...]:
        """The value of `--env.rewards`: functions and classes by the path of their copy."""
        if isinstance(rewards, str | Mapping) or not isinstance(rewards, Sequence):
            raise ConfigError(f"rewards is {rewards!r:.80}, not a list", fix="write rewards=[...]")
        if weights is not None and len(weights) != len(rewards):
            raise ConfigError(f"{len(weights)} reward_weights for {len(rewards)} rewards", fix="give one for each")
        source = CopiedSource()
        things = [thing for reward in rewards for thing in _things_in(reward)]
        for thing in things:
            source.add(thing)
        file = self._write("rewards.py", source.text) if things else self._folder
        entries = [_entry(reward, file) for reward in rewards]
        if weights is None:
            return tuple(entries)
        return tuple({**entry, "weight": weight} for entry, weight in zip(entries, weights, strict=True))

    def add_data(self, data: Data, name: str) -> str:
        """The value of `--env.data`: a file, or a folder of splits. A path or the id of a dataset is not changed."""
        if isinstance(data, str | os.PathLike):
            return os.fspath(data)
        if not isinstance(data, Mapping):
            return str(self._write("rows.jsonl", _as_lines(data, name)))
        files = {f"{split}.jsonl": _as_lines(rows, f"{name}[{split!r}]") for split, rows in data.items()}
        folder = self._folder / _hash_of("".join(f"{file}\n{text}" for file, text in files.items()))
        for file, text in files.items():
            self._write(file, text, folder)
        return str(folder)

    def _write(self, name: str, text: str, folder: Path | None = None) -> Path:
        file = (folder or self._folder / _hash_of(text)) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            replace_text(file, text)
        return file


def _things_in(reward: RewardLike) -> list[Any]:
    """The functions and classes of a reward; none for a name or a dict."""
    if isinstance(reward, Reward):
        return [leaf if isinstance(leaf, FunctionReward) else type(leaf) for leaf in leaves(reward)]
    if isinstance(reward, str | Mapping):
        return []
    if inspect.isfunction(reward):
        return [reward]
    name = getattr(reward, "__name__", repr(reward))
    fix = f"make one of it: {name}()" if inspect.isclass(reward) else "give functions, names, or rewards"
    raise ConfigError(f"{name} is not a reward", fix=fix)


def _entry(reward: Any, file: Path) -> dict[str, Any]:
    """A reward as `registry.create` takes it in any process; `file` has its functions and classes."""
    if isinstance(reward, str):
        return {"type": reward}
    if isinstance(reward, Mapping):
        return dict(reward)
    if not isinstance(reward, Reward):
        return {"type": f"{file}:{reward.__name__}"}
    own: dict[str, Any] = {"weight": reward.weight, "name": reward.name}
    if isinstance(reward, CombinedReward):
        parts = [_entry(part, file) for part in reward.rewards]
        return {"type": "combined", **own, "params": {"rewards": parts, "normalization": reward.normalization}}
    thing = reward.function if isinstance(reward, FunctionReward) else type(reward)
    return {"type": f"{file}:{thing.__name__}", **own, "params": reward.settings}


def _as_lines(rows: Iterable[Any], name: str) -> str:
    lines = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            fix = 'give dicts: [{"prompt": "2 + 2?", "answer": "4"}, ...]; of a pandas table: table.to_dict("records")'
            raise ConfigError(f"{name}[{number}] is {row!r:.60}, not a row", fix=fix)
        try:
            lines.append(json.dumps(dict(row), ensure_ascii=False, default=_as_plain) + "\n")
        except (TypeError, ValueError) as error:
            problem = f"{name}[{number}] cannot be written as JSON: {error}"
            raise ConfigError(problem, fix="leave that column out") from None
    return "".join(lines)


def _as_plain(value: Any) -> Any:
    """Convert a number or an array of NumPy or torch."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__qualname__} is in it")


def _hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]
