"""Flags made from the settings: every setting has one, as text it means the same, and the help is in a useful order."""

from __future__ import annotations

import re
from typing import Any

import pytest

from treadle.config import RunConfig, Section, TrainConfig, load_run
from treadle.config.atropos import SHORTHANDS
from treadle.config.distillation import DistillationOptions
from treadle.config.flags import FlagParser, add_flags, given
from treadle.config.sync import SyncOptions
from treadle.config.train import (
    LoraOptions,
    ObjectiveOptions,
    OptimizerOptions,
    ShardOptions,
    SpeedOptions,
    TrackOptions,
)

OPTIONS = (
    ObjectiveOptions,
    DistillationOptions,
    OptimizerOptions,
    LoraOptions,
    SpeedOptions,
    ShardOptions,
    SyncOptions,
    TrackOptions,
)
SECTIONS = [(name, type(f.default)) for name, f in RunConfig.model_fields.items() if isinstance(f.default, Section)]


def train_parser() -> FlagParser:
    parser = FlagParser(prog="treadle train")
    add_flags(parser, TrainConfig, prefix="train.")
    return parser


def help_groups(parser: FlagParser) -> dict[str, str]:
    """What --help shows under each heading."""
    pieces = re.split(r"^(\S.*):$", parser.format_help(), flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def flags_in(text: str) -> list[str]:
    """The first spelling of every flag that a group lists, as the name of its setting."""
    return [flag.replace("-", "_") for flag in re.findall(r"^  --(?:\w+\.)?([\w-]+)", text, flags=re.MULTILINE)]


def as_text(value: Any) -> list[str]:
    """How a user would type a value."""
    if isinstance(value, tuple):
        return [str(part) for part in value] or [""]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def test_the_trainers_help_groups_settings_in_a_fixed_order() -> None:
    groups = help_groups(train_parser())
    assert list(groups) == [
        "options",
        "the run",
        "objective",
        "distillation",
        "optimizer",
        "lora",
        "speed",
        "shard",
        "sync",
        "track",
        "shorthands",
    ]
    assert flags_in(groups["the run"])[:3] == ["model", "steps", "seed"]
    for heading, options in zip(list(groups)[2:-1], OPTIONS, strict=True):
        assert options.__doc__ is not None
        assert options.__doc__ in groups[heading]
        assert flags_in(groups[heading]) == list(options.model_fields)


def test_the_help_of_a_whole_run_keeps_the_groups_behind_their_section() -> None:
    parser = FlagParser(prog="treadle run")
    for name, kind in SECTIONS:
        add_flags(parser, kind, prefix=f"{name}.", dotted=True)
    trainers = [heading for heading in help_groups(parser) if heading.startswith("train")]
    topics = ("objective", "distillation", "optimizer", "lora", "speed", "shard", "sync", "track", "shorthands")
    assert trainers == ["train", *(f"train: {topic}" for topic in topics)]


@pytest.mark.parametrize(("section", "model"), SECTIONS)
def test_every_setting_appears_exactly_once(section: str, model: type[Section]) -> None:
    parser = FlagParser(prog="treadle")
    add_flags(parser, model, prefix=f"{section}.", dotted=True)
    shown = [flag for text in help_groups(parser).values() for flag in flags_in(text)]
    assert sorted(shown) == sorted([*model.model_fields, *(SHORTHANDS if section == "train" else ())])


@pytest.mark.parametrize(
    "shown",
    [
        "--use-wandb [TRUE|FALSE]",
        "--normalize-std [TRUE|FALSE]",
        "--steps N",
        "--vllm-port N",
        "--lr X",
        "--dual-clip X",
        "--importance-mask X [X ...]",
        "--objective NAME",
        "--track NAME [NAME ...]",
        "--lora-target-modules NAME [NAME ...]",
        "--train-layer-indices RANGE [RANGE ...]",
        "--metrics-file FILE",
        "--save-path PATH",
        "--engine-url URL [URL ...]",
    ],
)
def test_the_help_says_what_kind_of_value_a_flag_takes(shown: str) -> None:
    usage = " ".join(train_parser().format_usage().split())
    assert f"[{shown}]" in usage


def test_choices_and_defaults_are_shown_as_they_are_typed() -> None:
    text = " ".join(train_parser().format_help().split())
    assert "by its name: sets the settings below, except those given by themselves: grpo, dr_grpo, dapo" in text
    assert "which linear layers get an adapter (default: q_proj v_proj)" in text
    assert "standard deviation of their group (default: true)" in text
    assert "(default: None)" not in text
    assert "(default: ())" not in text


@pytest.mark.parametrize("name", TrainConfig.model_fields)
def test_a_default_given_as_text_changes_nothing(name: str) -> None:
    words = [f"--{name.replace('_', '-')}", *as_text(TrainConfig.model_fields[name].default)]
    assert load_run(None, given(train_parser().parse_args(words))).train == TrainConfig()


def test_all_defaults_given_as_text_at_once_change_nothing() -> None:
    words = [
        word
        for name, field in TrainConfig.model_fields.items()
        for word in (f"--{name.replace('_', '-')}", *as_text(field.default))
    ]
    assert load_run(None, given(train_parser().parse_args(words))).train == TrainConfig()


def test_a_small_choice_of_numbers_is_read_from_text() -> None:
    train = load_run(None, given(train_parser().parse_args(["--std-ddof", "1"]))).train
    assert train.std_ddof == 1
