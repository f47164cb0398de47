from __future__ import annotations

import math

import pytest
import torch

from tests.processors import NEEDS_BF16
from tests.tiny_policy import TinyPolicy, gradients_of
from treadle.config import TrainConfig
from treadle.errors import ConfigError, TrainingError
from treadle.train import optimizer as optimizer_module
from treadle.train.adamw_8bit import BLOCK, QuantizedMoment, round_stochastically
from treadle.train.optimizer import NUM_THRESHOLDS, THRESHOLD_STEP, Gradients, learning_rate, write_rounded
from treadle.train.optimizers import OPTIMIZERS, Adafactor, build_optimizer

NAMES = [pytest.param(name, marks=NEEDS_BF16) if name == "muon" else name for name in OPTIMIZERS]
SETTINGS = {"lr": 1e-3, "warmup_steps": 0, "schedule": "constant"}


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]),
]


def new_parts(name: str = "adamw", dtype: torch.dtype = torch.bfloat16, device: str = "cpu", **settings):
    policy = TinyPolicy(dtype, device)
    return policy, build_optimizer(policy, TrainConfig(optimizer=name, **{**SETTINGS, **settings}))


def take_step(policy, optimizer, step: int, *, factor: float = 1.0, **flags):
    policy.backward({name: factor * g for name, g in gradients_of(policy, step).items()})
    outcome = optimizer.step(step, **flags)
    policy.write_live_weights()
    return outcome


def everything(policy, optimizer):
    """Weights and state, as bytes would be compared; counters apart."""
    state = {k: v.clone() for k, v in optimizer.state().items() if not k.startswith("counter.num_skipped")}
    return state | {f"live.{name}": p.detach().clone() for name, p in policy.live.items()}


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize("name", NAMES)
def test_live_weights_change_when_published_and_not_before(name):
    policy, optimizer = new_parts(name)
    before = policy.snapshot()
    policy.backward(gradients_of(policy, 1))
    optimizer.step(1)
    assert same(policy.snapshot(), before)
    policy.write_live_weights()
    after = policy.snapshot()
    assert all(not torch.equal(after[n], before[n]) for n in before)
    policy.write_live_weights()  # publishing again takes no second step
    assert same(policy.snapshot(), after)
    assert all(not g.any() for g in optimizer.gradients.values())


@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_not_finite_is_skipped_and_counted(name):
    policy, optimizer = new_parts(name)
    take_step(policy, optimizer, 1)
    before = everything(policy, optimizer)
    for factor, flags in ((math.nan, {}), (math.inf, {}), (1.0, {"loss_is_finite": False})):
        outcome = take_step(policy, optimizer, 2, factor=factor, **flags)
        assert outcome.skipped
        assert outcome.learning_rate == 1e-3
        assert same(everything(policy, optimizer), before)
    assert (outcome.metrics()["skipped_steps"], outcome.metrics()["skipped_in_a_row"]) == (3, 3)
    assert not take_step(policy, optimizer, 2).skipped
    assert (optimizer.num_skipped, optimizer.num_skipped_in_a_row) == (3, 0)
    assert not same(everything(policy, optimizer), before)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_of_zero_moves_nothing_in_spite_of_momentum(name):
    policy, optimizer = new_parts(name)
    take_step(policy, optimizer, 1)
    before = everything(policy, optimizer)
    outcome = take_step(policy, optimizer, 2, factor=0.0)
    assert (outcome.grad_norm, outcome.skipped) == (0.0, False)
    assert same(everything(policy, optimizer), before)


def test_five_bad_gradients_in_a_row_end_the_training():
    policy, optimizer = new_parts()
    for step in range(1, 5):
        take_step(policy, optimizer, step, factor=math.nan)
    with pytest.raises(TrainingError, match="not a finite number in 5 steps in a row"):
        take_step(policy, optimizer, 5, factor=math.nan)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_the_next_step_depends_on_nothing_outside_of_the_state(name, device):
    policy, optimizer = new_parts(name, device=device)
    for step in (1, 2):
        take_step(policy, optimizer, step)
    take_step(policy, optimizer, 3, factor=math.nan)
    saved = {k: v.clone() for k, v in optimizer.state().items()}
    saved |= {f"live.{n}": p.detach().clone() for n, p in policy.live.items()}
    saved = {k: v.cpu() for k, v in saved.items()}  # as a file gives them
    again, again_optimizer = new_parts(name, device=device)
    fresh = again.snapshot()
    again_optimizer.load_state(saved)
    assert same(again.snapshot(), fresh)  # an engine may be reading: not before it is published
    again.write_live_weights()
    assert same(again.snapshot(), policy.snapshot())
    assert again_optimizer.num_skipped_in_a_row == 1
    for step in (4, 5):
        take_step(policy, optimizer, step)
        take_step(again, again_optimizer, step)
    assert same(everything(again, again_optimizer), everything(policy, optimizer))


@pytest.mark.parametrize("name", NAMES)
def test_a_state_of_other_parameters_is_refused_and_nothing_is_loaded(name):
    policy, optimizer = new_parts(name)
    take_step(policy, optimizer, 1)
    saved = optimizer.state() | {f"live.{n}": p.detach() for n, p in policy.live.items()}
    part = "mean_codes" if name == "adamw_8bit" else "master"
    other, other_optimizer = new_parts(name)
    before = everything(other, other_optimizer)
    for wrong in (
        {k: v for k, v in saved.items() if k != f"{part}.square.weight"},
        saved | {f"{part}.square.weight": torch.zeros(3, 3)},
        saved | {f"{part}.unknown": torch.zeros(3, 3)},
    ):
        with pytest.raises(TrainingError, match="does not fit what is trained now: 1 tensors differ"):
            other_optimizer.load_state(wrong)
        assert same(everything(other, other_optimizer), before)


def test_adamw_takes_the_steps_of_torchs_adamw_on_clipped_gradients():
    settings = {"weight_decay": 0.1, "max_grad_norm": 0.05, "schedule": "linear", "warmup_steps": 2, "steps": 6}
    policy, optimizer = new_parts("adamw", torch.float32, **settings)
    config = TrainConfig(**{**SETTINGS, **settings})
    reference = TinyPolicy(torch.float32)
    plain = torch.optim.AdamW(reference.live.values(), betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(1, 7):
        outcome = take_step(policy, optimizer, step)
        reference.backward(gradients_of(reference, step))
        norm = torch.nn.utils.clip_grad_norm_(reference.live.values(), 0.05)
        assert outcome.grad_norm == pytest.approx(float(norm), rel=1e-6)
        assert outcome.grad_norm > 0.05
        plain.param_groups[0]["lr"] = learning_rate(step, config)
        plain.step()
        plain.zero_grad()
    for name, p in policy.live.items():
        torch.testing.assert_close(p, reference.live[name], rtol=1e-5, atol=1e-7)


@NEEDS_BF16
def test_muon_moves_matrices_and_adamw_all_else():
    policy, optimizer = new_parts("muon")
    take_step(policy, optimizer, 1)
    parts = {key.partition(".")[::2] for key in optimizer.state()}
    matrices = {name for part, name in parts if part == "momentum_buffer"}
    assert matrices == {"square.weight", "tall.weight", "odd.weight"}
    assert {name for part, name in parts if part == "exp_avg"} == {"embedding.weight", "scale", "short"}
    # Orthogonalised, and as large as a step of AdamW: every singular value is near 0.2 * sqrt(256) * lr.
    moved = (optimizer.masters["square.weight"] - TinyPolicy(torch.float32).live["square.weight"]).detach()
    singular = torch.linalg.svdvals(moved) / (0.2 * 16 * 1e-3)
    assert 0.6 < float(singular.median()) < 1.3
    assert float(singular.max()) < 1.5


class TestAdafactor:
    @staticmethod
    def moved(start, gradient, **settings):
        weight = torch.nn.Parameter(start.clone())
        rule = Adafactor([weight], **{"weight_decay": 0.0, "scale_parameter": False, **settings})
        rule.param_groups[0]["lr"] = 0.1
        weight.grad = gradient
        rule.step()
        return weight.detach() - start

    def test_its_step_size_is_the_learning_rate(self):
        gradient = torch.tensor([[1.0, -2.0], [3.0, -6.0]])  # of rank one: the factors hold it exactly
        for scale in (0.01, 1.0, 100.0):  # whatever the size of the weights
            moved = self.moved(scale * torch.ones(2, 2), gradient)
            torch.testing.assert_close(moved, -0.1 * gradient.sign(), rtol=1e-3, atol=0)

    def test_it_can_scale_with_the_weights(self):
        for scale, size in ((100.0, 100.0), (2.0, 2.0), (0.0, 1e-3)):
            start = scale * torch.ones(2, 2)
            moved = self.moved(start, torch.ones(2, 2), scale_parameter=True)
            torch.testing.assert_close(moved, torch.full((2, 2), -0.1 * size), rtol=1e-3, atol=0)

    def test_it_can_have_a_step_size_of_its_own(self):
        _, optimizer = new_parts("adafactor", adafactor_relative_step=True)
        rates = [optimizer.step(step).learning_rate for step in (1, 10_000, 40_000)]
        assert rates == pytest.approx([0.01, 0.01, 0.005])

    def test_it_agrees_with_the_one_of_transformers(self):
        from transformers.optimization import Adafactor as Theirs

        for scale_parameter in (False, True):
            policy, optimizer = new_parts(
                "adafactor", torch.float32, adafactor_scale_parameter=scale_parameter, weight_decay=0.1
            )
            reference = TinyPolicy(torch.float32)
            theirs = Theirs(
                reference.live.values(), lr=1e-3, relative_step=False, scale_parameter=scale_parameter, weight_decay=0.0
            )
            for step in range(1, 5):
                take_step(policy, optimizer, step)
                reference.backward(gradients_of(reference, step))
                for p in reference.live.values():
                    p.data.mul_(1 - 1e-3 * 0.1)  # theirs scales the decay by the weights too; ours never does
                theirs.step()
                theirs.zero_grad()
            for name, p in policy.live.items():
                torch.testing.assert_close(p, reference.live[name], rtol=1e-4, atol=1e-6)


class TestEightBit:
    def test_codes_keep_the_peak_exactly_and_the_rest_on_average(self):
        values = torch.randn(8, BLOCK, generator=torch.Generator().manual_seed(1))
        for dtype, num_squarings, wanted in ((torch.int8, 1, values), (torch.uint8, 2, values.square())):
            moment = QuantizedMoment(8, torch.device("cpu"), dtype=dtype, num_squarings=num_squarings)
            generator = torch.Generator().manual_seed(2)
            reads = []
            for _ in range(400):
                moment.write(slice(None), wanted, generator)
                reads.append(moment.read(slice(None)))
            mean = torch.stack(reads).mean(0)
            peak = wanted.abs().amax(1, keepdim=True)
            assert bool(((reads[0] - wanted).abs() < 0.02 * peak).all())
            assert bool(((mean - wanted).abs() < 0.002 * peak).all())
            at_peak = wanted.abs() == peak
            torch.testing.assert_close(reads[0][at_peak], wanted[at_peak], rtol=1e-6, atol=0)

    def test_a_mean_square_follows_slow_changes(self):
        """Rounded to the nearest code, one that falls by 1 % a step would stand still."""
        moment = QuantizedMoment(1, torch.device("cpu"), dtype=torch.uint8, num_squarings=2)
        generator = torch.Generator().manual_seed(0)
        values = torch.cat([torch.ones(1, 1), 0.1 * torch.ones(1, BLOCK - 1)], 1)
        moment.write(slice(None), values, generator)
        for _ in range(100):
            values = moment.read(slice(None))
            values[:, 1:] *= 0.99
            moment.write(slice(None), values, generator)
        mean = float(moment.read(slice(None))[:, 1:].mean())
        assert mean == pytest.approx(0.1 * 0.99**100, rel=0.05)

    def test_weights_are_rounded_up_as_often_as_they_are_far(self):
        values = torch.tensor([0.02, -0.02, 1.5, -3e-5]).repeat(20000, 1) * (1 + 1e-3)
        rounded = round_stochastically(values, torch.Generator().manual_seed(0))
        torch.testing.assert_close(rounded.float().mean(0), values[0], rtol=1e-4, atol=0)
        exact = torch.tensor([0.0, 1.0, -0.25, 2.0**-130, -(2.0**100)])
        assert torch.equal(round_stochastically(exact, torch.Generator()).float(), exact)

    def test_float16_weights_are_refused(self):
        with pytest.raises(ConfigError, match="float16 is too coarse"):
            new_parts("adamw_8bit", torch.float16)

    def test_a_step_on_an_unpublished_step_is_a_mistake_in_the_program(self):
        policy, optimizer = new_parts("adamw_8bit")
        policy.backward(gradients_of(policy, 1))
        optimizer.step(1)
        policy.backward(gradients_of(policy, 2))
        with pytest.raises(RuntimeError, match="was not published"):
            optimizer.step(2)


class TestRounding:
    @pytest.mark.parametrize("first", [0, 7, NUM_THRESHOLDS - 1, 3 * NUM_THRESHOLDS + 5])
    @pytest.mark.parametrize("shape", [(5,), (NUM_THRESHOLDS,), (3, NUM_THRESHOLDS + 1), (3, 400_000)])
    def test_a_value_is_rounded_at_the_threshold_of_its_place(self, shape, first):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        rounded = torch.empty(shape, dtype=torch.bfloat16)
        write_rounded(rounded, values, first)
        bits = values.view(torch.int32).view(-1).long() & 0xFFFFFFFF
        places = torch.arange(first, first + len(bits))
        wanted = bits + places * THRESHOLD_STEP % NUM_THRESHOLDS >> 16
        assert torch.equal(rounded.view(torch.int16).view(-1).long() & 0xFFFF, wanted)

    @pytest.mark.parametrize("bits", [0x7F800001, 0x7FC00000, 0x7FFFFFFF, -0x7FFFFF, -0x400000, -1])
    def test_a_nan_stays_one_in_every_place(self, bits):
        """Added to a threshold, its bits may overflow into those of zero or of infinity."""
        values = torch.full((NUM_THRESHOLDS + 3,), bits, dtype=torch.int32).view(torch.float32)
        rounded = torch.zeros(len(values), dtype=torch.bfloat16)
        write_rounded(rounded, values)
        assert rounded.isnan().all()

    def test_infinities_are_kept_beside_a_nan(self):
        values = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
        rounded = torch.zeros(4, dtype=torch.bfloat16)
        write_rounded(rounded, values)
        assert rounded.tolist() == [math.inf, -math.inf, pytest.approx(math.nan, nan_ok=True), 1.0]

    def test_thresholds_are_made_once_for_all_shapes(self):
        for first in (0, 9):
            for length in range(1, 7):
                write_rounded(torch.empty(length, dtype=torch.bfloat16), torch.ones(length), first)
        before = optimizer_module._thresholds.cache_info().misses
        for length in range(1, 7):
            write_rounded(torch.empty(length, dtype=torch.bfloat16), torch.ones(length))
        assert optimizer_module._thresholds.cache_info().misses == before


class TestGradients:
    @pytest.mark.parametrize("name", NAMES)
    def test_taking_them_in_pieces_changes_nothing(self, name, monkeypatch):
        whole = new_parts(name, gradient_dtype="bfloat16")
        parts = new_parts(name, gradient_dtype="bfloat16")
        for step in (1, 2):
            take_step(*whole, step)
        monkeypatch.setattr(optimizer_module, "PIECE_BYTES", 100_000)
        assert len(list(parts[1]._gradients.pieces())) > 2
        for step in (1, 2):
            take_step(*parts, step)
        assert same(everything(*whole), everything(*parts))

    def test_many_small_ones_add_up_in_fp32(self):
        weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        sums = Gradients({"w": weight}, torch.float32, torch.device("cpu"))
        (weight * 1.0).sum().backward()
        for _ in range(256):
            (weight * 2**-8).sum().backward()  # each one is half of bf16's resolution at 1
            assert weight.grad is None
        assert torch.equal(sums.by_name["w"], torch.full((4,), 2.0))
        assert sums.norm() == 4.0
        sums.scale(0.5)
        assert sums.norm() == 2.0
        sums.zero()
        assert sums.norm() == 0.0

    def test_the_norm_of_bf16_sums_is_fp32(self):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        sums = Gradients({"w": weight}, torch.bfloat16, torch.device("cpu"))
        weight.sum().backward()
        assert sums.norm() == pytest.approx(1000**0.5, rel=1e-6)
