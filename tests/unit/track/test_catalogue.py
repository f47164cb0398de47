"""Every metric is explained, every other name for it leads to one metric, and the page says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from treadle.track.catalogue import DIALECTS, METRICS, Band, band_of, render_page, with_aliases

WITHOUT_UNIT = {
    "loss", "policy_loss", "rollout_corr/chi2_token", "rollout_corr/training_ppl", "rollout_corr/rollout_ppl",
    "grad_norm", "learning_rate",
}  # fmt: skip


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    assert len(METRICS) > 70
    for entry in METRICS.values():
        assert bool(entry.unit) != (entry.name in WITHOUT_UNIT), entry.name
        assert entry.meaning.endswith("."), entry.name
        assert len(entry.meaning) > 10, entry.name
        assert set(entry.aliases) <= set(DIALECTS)


def test_an_alias_means_one_metric_in_all_dialects_together() -> None:
    owners: dict[str, str] = {}
    for entry in METRICS.values():
        for alias in entry.aliases.values():
            assert owners.setdefault(alias, entry.name) == entry.name, alias
            assert alias == entry.name or alias not in METRICS, f"{alias} is a metric of its own"
    assert len(owners) > 60


def test_no_metric_is_named_twice() -> None:
    from treadle.track.catalogue import SECTIONS

    assert sum(map(len, SECTIONS.values())) == len(METRICS)


@pytest.mark.parametrize(
    ("dialects", "names"),
    [
        ((), {"learning_rate", "perf/step_s", "rollout/own"}),
        (("trl",), {"learning_rate", "perf/step_s", "rollout/own", "step_time"}),
        (
            ("verl", "atropos"),
            {
                "learning_rate", "perf/step_s", "rollout/own", "actor/lr", "perf/time_per_step", "train/lr",
                "train/step_time",
            },
        ),
    ],
)  # fmt: skip
def test_names_of_other_trainers_stand_beside_ours(dialects: tuple[str, ...], names: set[str]) -> None:
    metrics = with_aliases({"learning_rate": 1e-5, "perf/step_s": 4.0, "rollout/own": 7.0}, dialects)
    assert set(metrics) == names
    assert {value for name, value in metrics.items() if name.endswith(("lr", "learning_rate"))} == {1e-5}


def test_the_health_check_and_the_page_share_numeric_ranges() -> None:
    assert str(band_of("mean_kl")) == METRICS["mean_kl"].healthy == "below 0.1; alarm above 0.5"
    assert (band_of("mean_kl").limit, band_of("clipped_fraction").limit) == (0.5, 0.3)
    assert [str(Band(0.8, 1.2)), str(Band(low=0.5)), str(Band(high=0.0))] == ["0.8 to 1.2", "above 0.5", "0"]
    assert str(band_of("sampling/sampling_logp_difference/mean")) == "below 0.05 on-policy"
    assert METRICS["reward"].band is None
    page = Path(__file__).parents[3] / "docs" / "troubleshooting.md"
    assert f"below {band_of('sampling/sampling_logp_difference/mean').high} on rollouts" in page.read_text()


def test_the_page_is_made_from_the_catalogue() -> None:
    page = Path(__file__).parents[3] / "docs" / "metrics.md"
    assert page.read_text() == render_page(), (
        "make it again: the docstring of treadle/track/catalogue.py has the command"
    )
    assert "| `learning_rate` |  | Learning rate of the step. |  | same | `actor/lr` | `train/lr` |" in render_page()
