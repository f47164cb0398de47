"""The best completions of a run, taken from its own store by their sampled tokens."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from treadle.config import load_run
from treadle.config.load import save_run
from treadle.errors import ConfigError
from treadle.sft.rollouts import check_tokenizer, load_rollouts
from treadle.store import Limits, NewGroup, Post, SqliteStore
from treadle.wire.groups import IGNORED, ScoredGroup, pack_group

PROMPT = [5, 6]


def group(*rollouts: tuple[list[int], float], cut_off: bool = False) -> ScoredGroup:
    """(completion, score) of each rollout."""
    return ScoredGroup(
        tokens=[[*PROMPT, *completion] for completion, _ in rollouts],
        masks=[[IGNORED, IGNORED, *completion] for completion, _ in rollouts],
        scores=[score for _, score in rollouts],
        inference_logprobs=[[1.0, 1.0, *[-0.5] * len(completion)] for completion, _ in rollouts],
        overrides=[{"finish_reason": "length" if cut_off else "stop"} for _ in rollouts],
    )


@pytest.fixture
def run(tmp_path: Path):
    """A run whose store holds these groups."""
    config = load_run(None, {"hub.database": tmp_path / "hub.sqlite"})
    save_run(config, tmp_path / "config.json")

    def write(*groups: ScoredGroup):
        packed = [
            NewGroup(pack_group(one), size=one.size, num_tokens=sum(map(len, one.tokens)), format="binary")
            for one in groups
        ]
        with SqliteStore.open(tmp_path / "hub.sqlite") as store:
            store.append(Post(packed), Limits(groups=100)).result()
        return config, tmp_path

    return write


def test_completions_with_a_good_score_are_taken_once(run):
    config, folder = run(
        group(([10, 1], 1.0), ([11, 1], 0.0), ([10, 1], 1.0)),
        group(([12, 1], 1.0), ([13, 1], 0.5)),
        group(([14, 15], 1.0), cut_off=True),
        group(([10, 1], 1.0), ([16, 17, 18, 19, 1], 2.0)),
    )
    examples = load_rollouts(config, folder, 1.0, seq_len=6)
    assert sorted(example.tokens.tolist() for example in examples) == [[*PROMPT, 10, 1], [*PROMPT, 12, 1]]
    assert all(example.is_trained.tolist() == [False, False, True, True] for example in examples)
    longer = load_rollouts(config, folder, 0.5, seq_len=7)
    assert sorted(len(example.tokens) for example in longer) == [4, 4, 4, 7]


def test_what_is_left_out_is_counted_and_said(run):
    unscored = group(([30, 1], 1.0), ([31, 1], 1.0))  # the second has the mean of the others
    unscored.overrides[1] = {"finish_reason": "stop", "set_advantage_to_zero": True, "outcome": "judge_failed"}
    config, folder = run(
        group(([10, 1], 1.0), ([11, 1], 0.0)),
        group(([12, 13], 1.0), ([14, 15], 0.0), cut_off=True),
        unscored,
        group(([20, 1], 1.0), ([21, 1], 0.0)),
    )
    with closing(sqlite3.connect(folder / "hub.sqlite")) as queue, queue:  # as the hub does it with old steps
        queue.execute("UPDATE groups SET num_bytes = 0 WHERE id = 1")
        queue.execute("DELETE FROM payloads WHERE id = 1")
    said: list[str] = []
    examples = load_rollouts(config, folder, 1.0, 64, said.append)
    assert [example.tokens.tolist() for example in examples] == [[*PROMPT, 30, 1], [*PROMPT, 20, 1]]
    assert said == [
        "1 group skipped: their tokens are no longer kept (--hub.keep-trained-bytes), the oldest first",
        "1 completion with a score of at least 1 left out: cut off, or longer than 64 tokens",
        "1 completion left out: they have no score",
    ]
    dropping = load_run(None, {"hub.database": folder / "hub.sqlite", "env.ensure_scores_are_not_same": "true"})
    load_rollouts(dropping, folder, 1.0, 64, said.append)
    assert "groups with equal scores are missing" in said[-1]


def test_a_score_that_nothing_reached_is_refused_with_the_best_one(run):
    config, folder = run(group(([10, 1], 0.25), ([11, 1], 0.0)))
    with pytest.raises(ConfigError, match=r"the best of 2 scored 0\.25") as refused:
        load_rollouts(config, folder, 1.0, seq_len=64)
    assert refused.value.fix == "--min-score 0.25"
    config, folder = run(group(([10, 11], 1.0), ([12, 13], 1.0), cut_off=True))
    with pytest.raises(ConfigError, match=r"2 completions of .* and all were cut off"):
        load_rollouts(config, folder, 1.0, seq_len=64)


def test_another_model_needs_a_tokenizer_that_can_be_compared(tmp_path):
    folders = {name: tmp_path / name for name in ("own", "same", "other", "none")}
    for name, folder in folders.items():
        folder.mkdir()
        if name != "none":
            (folder / "tokenizer.json").write_text("b" if name == "other" else "a")

    def check(model: str, run_model: str = "own") -> None:
        run = load_run(None, {"model": run_model, "engine.model": str(folders[run_model])})
        check_tokenizer(run, tmp_path / "run", model, folders[model])

    check("own")
    check("same")
    check("none", run_model="none")  # the run's own model
    with pytest.raises(ConfigError, match="other has another tokenizer"):
        check("other")
    for model, run_model in (("same", "none"), ("none", "own")):
        with pytest.raises(ConfigError, match=r"there is no .*none/tokenizer\.json") as refused:
            check(model, run_model)
        assert "leave --model out" in refused.value.fix


def test_a_run_without_completions_is_refused(run):
    config, folder = run()
    with pytest.raises(ConfigError, match="has no completions to train on"):
        load_rollouts(config, folder, 1.0, seq_len=64)
