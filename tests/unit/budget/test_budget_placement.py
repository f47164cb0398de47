"""Which GPUs engine and trainer ranks get: a table of models, cards and numbers of cards."""

from __future__ import annotations

import pytest

from treadle.budget.hardware import CARDS
from treadle.budget.placement import EngineDemand, GpuWishes, Placement, as_ranges, choose_placement
from treadle.budget.shapes import KNOWN
from treadle.errors import ConfigError

SHARED, TWO = "engine and trainer share GPU 0", "engine on GPU 0, trainer on GPU 1"


def place(num_gpus: int, model: str = "qwen3-1.7b", card: str = "h100", **wishes: object) -> Placement:
    demand = EngineDemand.of(KNOWN[model], max_num_seqs=128, max_model_len=2048)
    return choose_placement(range(num_gpus), CARDS[card], demand, GpuWishes(**wishes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "card", "num_gpus", "layout"),
    [
        ("smollm2-135m", "l4", 1, SHARED),
        ("qwen2.5-72b", "h100", 1, SHARED),  # it does not fit; treadle plan says so
        ("smollm2-135m", "l4", 2, TWO),
        ("qwen3-1.7b", "h100", 4, "engine on GPU 0, trainer on GPUs 1-3 (3 ranks)"),
        ("qwen2.5-7b", "h100", 8, "engine on GPU 0, trainer on GPUs 1-7 (7 ranks)"),
        ("llama-3.1-8b", "rtx4090", 2, TWO),  # room for fewer sequences than wanted
        ("llama-3.1-8b", "rtx4090", 4, "engine on GPUs 0-1 (tensor parallel 2), trainer on GPUs 2-3 (2 ranks)"),
        ("qwen2.5-32b", "h100", 4, "engine on GPUs 0-1 (tensor parallel 2), trainer on GPUs 2-3 (2 ranks)"),
        ("qwen2.5-72b", "h100", 3, "engine on GPUs 0-1 (tensor parallel 2), trainer on GPU 2"),  # over half
        ("qwen2.5-72b", "h100", 8, "engine on GPUs 0-3 (tensor parallel 4), trainer on GPUs 4-7 (4 ranks)"),
        ("qwen2.5-72b", "b200", 8, "engine on GPU 0, trainer on GPUs 1-7 (7 ranks)"),
    ],
)
def test_the_engine_takes_as_few_gpus_as_hold_it(model: str, card: str, num_gpus: int, layout: str) -> None:
    assert str(place(num_gpus, model, card)) == layout


def test_an_engine_is_split_only_where_its_heads_can_be_divided() -> None:
    demand = EngineDemand(weight_bytes=3e11, num_heads=9, num_kv_heads=3)  # as SmolLM2, but huge
    assert demand.sizes(8) == [1, 3]
    assert choose_placement(range(8), CARDS["h100"], demand).engine_gpus == (0, 1, 2)
    cannot = GpuWishes(can_split=False)
    assert choose_placement(range(8), CARDS["h100"], demand, cannot).engine_gpus == (0,)


@pytest.mark.parametrize(
    ("num_gpus", "wishes", "engine", "train"),
    [
        (4, {"train_gpus": (2, 3)}, (0,), (2, 3)),
        (4, {"train_gpus": (0,)}, (1,), (0,)),
        (4, {"engine_gpus": (3,)}, (3,), (0, 1, 2)),
        (4, {"engine_gpus": (2, 3), "ranks": 1}, (2, 3), (0,)),
        (4, {"engine_gpus": (1,), "train_gpus": (1,)}, (1,), (1,)),
        (4, {"tensor_parallel": 2}, (0, 1), (2, 3)),
        (4, {"ranks": 2}, (0,), (1, 2)),
        (4, {"ranks_multiple": 2}, (0,), (1, 2)),
        (8, {"ranks_multiple": 2}, (0,), (1, 2, 3, 4, 5, 6)),
        (8, {"ranks_multiple": 2, "tensor_parallel": 2}, (0, 1), (2, 3, 4, 5, 6, 7)),
        (4, {"ranks_multiple": 2, "engine_gpus": (3,)}, (3,), (0, 1)),
        (4, {"train_gpus": (2, 3), "tensor_parallel": 2}, (0, 1), (2, 3)),
        (4, {"is_one_copy": True}, (0,), (0,)),
        (4, {"is_one_copy": True, "train_gpus": (3,)}, (3,), (3,)),
        (1, {"ranks": 1, "tensor_parallel": 1}, (0,), (0,)),
    ],
)
def test_what_the_user_chose_is_kept(num_gpus, wishes, engine, train) -> None:
    placement = place(num_gpus, **wishes)
    assert (placement.engine_gpus, placement.train_gpus) == (engine, train)
    assert placement.is_shared == (engine == train)


@pytest.mark.parametrize(
    ("num_gpus", "wishes", "message", "fix"),
    [
        (
            1,
            {"ranks": 2},
            "an engine on 1 GPU and 2 trainer ranks need 3 GPUs, and this run can use GPU 0",
            "--train.ranks 1",
        ),
        (2, {"ranks": 2}, "need 3 GPUs, and this run can use GPUs 0-1", "--train.ranks 1"),
        (2, {"ranks_multiple": 2}, "an engine on 1 GPU and 2 trainer ranks need 3 GPUs", "a smaller --train.context"),
        (4, {"tensor_parallel": 4}, "an engine on 4 GPUs and 1 trainer rank need 5", "--engine.tensor-parallel-size 1"),
        (4, {"engine_gpus": (0, 1, 2, 3)}, "an engine on 4 GPUs and 1 trainer rank need 5", "--engine.gpus"),
        (4, {"train_gpus": (0, 1, 2, 3)}, "need 5 GPUs", "--train.ranks 3"),
        (2, {"train_gpus": (1,), "tensor_parallel": 2}, "an engine on 2 GPUs", "--engine.tensor-parallel-size 1"),
        (4, {"train_gpus": (7,)}, "there is no GPU 7: this run can use GPUs 0-3", "--train.gpus"),
        (1, {"engine_gpus": (1,)}, "there is no GPU 1: this run can use only GPU 0", "--engine.gpus"),
        (
            4,
            {"train_gpus": (2, 3), "ranks": 3},
            "train.gpus names 2 GPUs (2-3), and train.ranks is 3",
            "--train.gpus 0-2",
        ),
        (
            4,
            {"engine_gpus": (0, 1), "train_gpus": (1, 2)},
            "GPU 1 would be used by the engine and by the trainer",
            "--train.gpus",
        ),
        (4, {"engine_gpus": (0, 1), "train_gpus": (0, 1)}, "GPUs 0-1 would be used", "--engine.gpus"),
        (
            4,
            {"engine_gpus": (0, 1), "can_split": False},
            "the transformers engine runs on one GPU",
            "one GPU",
        ),
        (4, {"is_one_copy": True, "ranks": 2}, "one copy of the weights", "--train.use-shared-memory true"),
        (4, {"is_one_copy": True, "engine_gpus": (0,), "train_gpus": (1,)}, "one copy", "--train.use-shared-memory"),
    ],
)
def test_what_cannot_be_names_the_flag_that_helps(num_gpus, wishes, message, fix) -> None:
    with pytest.raises(ConfigError) as caught:
        place(num_gpus, **wishes)
    assert message in caught.value.message
    assert fix in caught.value.fix


def test_gpus_are_written_as_flags_take_them() -> None:
    assert [as_ranges(gpus) for gpus in ((0,), (0, 1), (5, 2, 0, 1))] == ["0", "0-1", "0-2,5"]
