from __future__ import annotations

import pytest

from treadle.cli import main
from treadle.config import load_run
from treadle.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"env.group_size": "1"}, "group of one"),
        ({"env.group_size": "6"}, "no multiple"),
        ({"engine.max_num_seqs": "4"}, "max_num_seqs"),
        ({"env.temperature": "0"}, "temperature 0"),
        ({"env.temperature": "0.009"}, "temperature 0.009"),
    ],
)
def test_what_cannot_work_together_is_refused_before_anything_starts(settings, words):
    with pytest.raises(ConfigError, match=words):
        load_run(None, settings).check_together()


def test_a_process_alone_needs_only_its_own_section():
    assert load_run(None, {"train.batch_size": "2"}).train.batch_size == 2


def test_clip_eps_sets_both_bounds_whatever_was_saved():
    run = load_run(None, {"train.clip_low": 0.3, "train.clip_high": 0.4, "train.clip_eps": "0.1"})
    assert (run.train.clip_low, run.train.clip_high) == (0.1, 0.1)


@pytest.mark.parametrize(
    ("flag", "wanted"),
    [("--lr", "--train.lr"), ("--group-size", "--env.group-size"), ("--train.learning-rte", "--train.learning-rate")],
)
def test_an_unknown_flag_is_answered_with_the_one_that_was_meant(flag, wanted, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", flag, "1"])
    assert ended.value.code == 2
    assert f"did you mean '{wanted}'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "words"), [(["--env.task", "additon"], "addition"), (["--env.name", "ecko"], "echo")]
)
def test_an_unknown_environment_is_refused_before_anything_is_created(flags, words, capsys, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--output", str(tmp_path / "runs"), *flags])
    assert ended.value.code == 2
    assert f"did you mean '{words}'?" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
