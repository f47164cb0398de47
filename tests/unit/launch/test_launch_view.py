"""The live view of a run in the terminal."""

from __future__ import annotations

import io
import re
import webbrowser
from pathlib import Path

import pytest
from rich.console import Console

from tests.written_run import history_of, write_health, write_run
from treadle.config import load_run
from treadle.formatting import counted, duration, one_line, sparkline
from treadle.launch.monitor import RunStatus
from treadle.launch.view import LiveView, PlainView, RunPage, Screen, ViewState, current_phase, draw, time_left_s
from treadle.report.history import History, HistoryReader
from treadle.track.files import HEALTH_FILE, HealthFile
from treadle.wire.hub import LastReport, ProcessReport, WaitReport, WorkReport


def state_of(folder: Path, num_steps: int) -> ViewState:
    config = write_run(folder, num_steps=num_steps, is_evaluated=False)
    return ViewState(
        config,
        "20260102-030405-arithmetic-addition",
        history=history_of(config, folder),
        phase="training",
        num_queued=8,
        memory_bytes=4_200_000_000,
        begun=0.0,
        clock=lambda: 75.0,
    )


def test_the_panel_shows_every_figure(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(draw(state_of(tmp_path, 25)))
    text = console.export_text()
    for figure in (
        "20260102-030405-arithmetic-addition",
        "smollm2-135m-instruct",
        "addition",
        "step 25/50",
        "0.450",
        "40.0 %",
        "generated tokens/s  812",
        "trained tokens/s  412",
        "0.008",
        "8 groups",
        "1.0",
        "4.20 GB",
        "in parallel: generation 3.0",
        "training 4.0",
        "waiting 0.5",
        "1 min 15 s",
        "2 min 05 s left",
        "▁",
        "1.6 % at step 0",
        "training",
    ):
        assert figure in text, figure
    assert max(map(len, text.splitlines())) <= 100


def test_the_title_of_the_panel_keeps_the_task_of_a_model_with_a_long_path(tmp_path: Path) -> None:
    state = state_of(tmp_path, 25)
    long = "/data/" + "very/" * 30 + "my-model"
    state.config = state.config.model_copy(update={"model": long})
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(draw(state))
    title = console.export_text().splitlines()[0]
    assert f"{state.run_name}  {state.config.env.task_name}  my-model" in title


def test_the_sparkline_of_the_panel_shows_the_reward(tmp_path: Path) -> None:
    """Whatever its scale is: accuracy is a share, a reward may be negative."""
    state = state_of(tmp_path, 25)
    steps = tuple({"step": n, "reward": reward} for n, reward in enumerate((-2.0, -1.0, 5.0), start=1))
    state.history = History(steps)
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(draw(state))
    assert "reward per step    ▁▂█  -2.000 → 5.000" in console.export_text()


@pytest.mark.parametrize("width", [40, 60, 80])
def test_the_panel_fits_small_terminals_and_knows_nothing_at_first(width: int) -> None:
    console = Console(file=io.StringIO(), record=True, width=width)
    console.print(draw(ViewState(load_run(None, {"steps": 50}), "run")))
    text = console.export_text()
    assert "step 0/50" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_name_with_brackets_is_no_markup() -> None:
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(draw(ViewState(load_run(None, {"model": "my[/x]model"}), "run")))
    assert "my[/x]model" in console.export_text()


def test_the_panel_shows_generated_tokens_while_nothing_is_trained() -> None:
    state = ViewState(load_run(None, {}), "run", status=RunStatus(generated_tok_s=731.0), clock=lambda: 1.0, begun=0.0)
    state.history = History(steps=({"step": 1, "perf/trained_tok_s_wall_clock": 0.0},))
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(draw(state))
    shown = console.export_text()
    assert re.search(r"generated tokens/s +731\b", shown)
    assert re.search(r"trained tokens/s +0\b", shown)


def test_plain_lines_tell_each_step_and_phase_once(tmp_path: Path) -> None:
    state = state_of(tmp_path, 2)
    whole, state.history = state.history, History()
    out = io.StringIO()
    view = PlainView(out)
    state.phase = "starting hub and engine"
    view.update(state)
    state.history, state.phase = whole, "training"
    view.update(state)
    view.update(state)
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting hub and engine..."
    assert lines[1] == "held-out accuracy at step 0: 1.6 % (0.6 % to 3.6 %), mean score 0.008"
    speeds = "generated 812 tokens/s  trained 412 tokens/s"
    assert lines[2].startswith(f"step   1/50  reward 0.066  accuracy 1.6 %  ended 97 %  {speeds}  5.0 s  age 1.0")
    assert lines[2].endswith("4 min 05 s left")
    assert lines[3].startswith("step   2/50")
    assert lines[4:] == ["training..."]


def test_a_resumed_run_does_not_tell_its_past_again(tmp_path: Path) -> None:
    out = io.StringIO()
    PlainView(out).update(state_of(tmp_path, 25))
    assert out.getvalue() == "training...\n"


def test_steps_that_are_taken_again_are_reported_again(tmp_path: Path) -> None:
    state = state_of(tmp_path, 3)
    whole = state.history
    out = io.StringIO()
    view = PlainView(out)
    for num_steps in (3, 1, 2):
        state.history = History(whole.steps[:num_steps])
        view.update(state)
    assert [line.split()[1] for line in out.getvalue().splitlines() if line.startswith("step")] == ["2/50"]


def test_a_live_view_draws_and_gives_the_terminal_back(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    state = state_of(tmp_path, 25)
    with Screen(LiveView(console, interval_s=0), state, lambda _: None) as screen:
        screen.tick()
        screen.tick()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "step 25/50" in text
    assert text.rstrip().endswith("\x1b[?25h") or "\x1b[?25h" in text.rsplit("step 25/50", 1)[1]


def test_a_broken_view_never_ends_a_run() -> None:
    def break_down(_state: ViewState) -> None:
        raise ZeroDivisionError

    state = ViewState(load_run(None), "run")
    with Screen(LiveView(Console(file=io.StringIO())), state, break_down) as screen:
        screen.tick()
        screen.tick()


def test_health_is_shown_in_the_panel_while_it_is_recent(tmp_path: Path) -> None:
    config = write_run(tmp_path, num_steps=25, is_evaluated=False)
    write_health(tmp_path, (2, "mean_kl 0.61 [b]"), (12, "mean_ratio 1.31"), (13, "grad_norm 45"), (25, "entropy fell"))
    state = ViewState(config, "run", history=history_of(config, tmp_path))
    for width in (100, 40):
        console = Console(file=io.StringIO(), record=True, width=width)
        console.print(draw(state))
        text = console.export_text()
        assert "! step 13: grad_norm 45" in text
        assert "! step 25: entropy fell" in text
        assert "mean_kl" not in text  # said long ago
        assert "mean_ratio" not in text  # two are enough
        assert max(map(len, text.splitlines())) <= width


def test_health_is_reported_once_in_plain_lines(tmp_path: Path) -> None:
    state = state_of(tmp_path, 2)
    out = io.StringIO()
    view = PlainView(out)
    reader = HistoryReader(tmp_path / "metrics.jsonl", tmp_path / "evals", HealthFile(tmp_path / HEALTH_FILE))
    state.history = reader.read()
    view.update(state)
    write_health(tmp_path, (2, 'cut off "here"'))
    for _ in range(2):
        state.history = reader.read()
        view.update(state)
    assert out.getvalue().splitlines() == ["training...", 'health: step 2: cut off "here"']


def test_phases_are_reported_from_what_was_written(tmp_path: Path) -> None:
    config = write_run(tmp_path)
    whole = history_of(config, tmp_path)
    assert current_phase(History(), config) == "measuring held-out accuracy before training"
    assert current_phase(History((), whole.evaluations[:1]), config) == "collecting the first batch"
    assert current_phase(History(whole.steps[:9], whole.evaluations[:1]), config) == "training"
    unmeasured = History(whole.steps, whole.evaluations[:1])
    assert current_phase(unmeasured, config) == "measuring held-out accuracy after training"
    assert current_phase(whole, config) == "finishing"
    assert current_phase(History(), load_run(None, {"env.num_eval": "0"})) == "collecting the first batch"


def test_half_written_files_are_read_when_they_are_whole(tmp_path: Path) -> None:
    reader = HistoryReader(tmp_path / "metrics.jsonl", tmp_path / "evals")
    assert reader.read() == History()
    (tmp_path / "evals").mkdir()
    (tmp_path / "evals" / "a.json").write_text('{"step": 0, "acc')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    assert (reader.read().last_step, reader.read().evaluations) == (1, ())
    (tmp_path / "evals" / "a.json").write_text('{"step": 0, "accuracy": 0.5, "interval_95": [0.4, 0.6]}')
    assert [found.accuracy for found in reader.read().evaluations] == [0.5]


def test_words() -> None:
    assert [duration(s) for s in (0.4, 75, 3723)] == ["0 s", "1 min 15 s", "1 h 02 min"]
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([]) == ""
    assert sparkline([0.3, 0.3]) == "▁▁"
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert len(sparkline([0.1] * 500)) == 40
    assert one_line("a\n b\x1b[31m " + "c" * 99, 10) == "a b[31m c…"
    assert time_left_s(History(), 50) is None


def test_a_plain_view_prints_one_short_waiting_line_every_15_s(tmp_path: Path) -> None:
    out = io.StringIO()
    state, view = state_of(tmp_path, 25), PlainView(out)
    for second in range(100, 147):
        state.clock = lambda second=second: second
        state.status = RunStatus(now="" if second < 120 else f"evaluating at step 0: {second} of 256")
        view.update(state)
    assert out.getvalue().splitlines() == [
        "training...",
        "training, 15 s",
        "evaluating at step 0: 130 of 256, 30 s",
        "evaluating at step 0: 145 of 256, 45 s",
    ]


def test_no_waiting_line_while_steps_are_printed(tmp_path: Path) -> None:
    out = io.StringIO()
    state, view = state_of(tmp_path, 25), PlainView(out)
    whole, state.status = state.history, RunStatus(now="waiting for the batch")
    for number in range(10):
        state.clock = lambda number=number: 10.0 * number
        state.history = History(whole.steps[:number])
        view.update(state)
    assert [line.split()[0] for line in out.getvalue().splitlines()] == ["training...", *["step"] * 9]


def test_a_waiting_line_goes_on_with_the_explanation_of_a_problem(tmp_path: Path) -> None:
    out = io.StringIO()
    state, view = state_of(tmp_path, 25), PlainView(out)
    state.status = RunStatus(now="waiting for the batch of step 26", notes=("trainer has waited 500 s for the batch",))
    for state.clock in (lambda: 100.0, lambda: 115.0):
        view.update(state)
    assert out.getvalue().splitlines()[1:] == [
        "waiting for the batch of step 26, 15 s; trainer has waited 500 s for the batch"
    ]


def test_an_alarm_is_said_once_in_a_plain_view_and_stands_in_the_panel(tmp_path: Path) -> None:
    out = io.StringIO()
    state, view = state_of(tmp_path, 25), PlainView(out)
    state.status = RunStatus(notes=("env waits",), alarms=("engine is silent",))
    view.update(state)
    view.update(state)
    assert out.getvalue().count("watchdog: engine is silent") == 1
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(draw(state))
    text = console.export_text()
    assert "! engine is silent" in text


def test_a_restart_is_said_once_with_the_end_of_the_log(tmp_path: Path) -> None:
    out = io.StringIO()
    state, view = state_of(tmp_path, 25), PlainView(out)
    state.status = RunStatus(restarts=("trainer-1 died after step 3\n  | its last line",))
    view.update(state)
    view.update(state)
    assert out.getvalue().count("restart: trainer-1 died after step 3\n  | its last line\n") == 1
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(draw(state))
    text = console.export_text()
    assert "! trainer-1 died after step 3" in text
    assert "its last line" not in text


def test_the_panel_shows_each_process_with_what_it_does_or_waits_for(tmp_path: Path) -> None:
    def standing(kind: str, heard_s: float = 0.0, **more: object) -> LastReport:
        report = ProcessReport(kind=kind, name=kind, machine="m", pid=7, **more)  # type: ignore[arg-type]
        return LastReport(report=report, heard_s=heard_s)

    state = state_of(tmp_path, 25)
    state.status = RunStatus(
        standings=(
            standing("engine", state="generating 12, 3 waiting", policy_version=25, memory_bytes=1_500_000_000),
            standing("trainer", waits=[WaitReport(what="the batch of step 26 (3 of 8)", of="env", seconds=42.0)]),
            standing("env", heard_s=33.0, work=WorkReport(what="evaluating at step 20", done=64, total=256)),
        )
    )
    console = Console(file=io.StringIO(), record=True, width=100)
    console.print(draw(state))
    text = console.export_text()
    for words in (
        "generating 12, 3 waiting",
        "version 25",
        "1.50 GB",
        "waits 42 s for the batch of step 26",
        "no report for 33 s",
        "evaluating at step 20: 64 of 256",
    ):
        assert words in text, words
    assert "3 of 8" not in text


@pytest.mark.parametrize(
    ("seconds", "is_late", "shown"),
    [
        (40.0, False, "waits 40 s for the engine to be ready"),
        (60.0, False, "\x1b[33mwaits 1 min 00 s for the engine at http://127.0.0.1:9001 to be ready"),
        (101.0, True, "\x1b[31mwaits 1 min 41 s for the engine at http://127.0.0.1:9001 to be ready"),
    ],
)
def test_the_panel_colours_only_waits_past_half_of_their_deadline(seconds: float, is_late: bool, shown: str) -> None:
    wait = WaitReport(
        what="the engine at http://127.0.0.1:9001 to be ready",
        of="engine",
        seconds=seconds,
        deadline_s=100.0,
        is_late=is_late,
    )
    report = ProcessReport(kind="trainer", name="trainer", machine="m", pid=7, waits=[wait])
    status = RunStatus(standings=(LastReport(report=report, heard_s=0.0),))
    console = Console(file=io.StringIO(), record=True, width=120, force_terminal=True)
    console.print(draw(ViewState(load_run(None, {"steps": 50}), "run", status=status)))
    text = console.export_text(styles=True)
    assert shown in text
    assert ("\x1b[33mwaits" in text or "\x1b[31mwaits" in text) == shown.startswith("\x1b")


# ---- the address of the page

URL = "http://127.0.0.1:8000"
TOKEN = "a-token-of-more-than-sixteen"  # noqa: S105


def no_browser() -> webbrowser.BaseBrowser:
    raise webbrowser.Error("could not locate runnable browser")


def text_browser() -> webbrowser.BaseBrowser:
    return webbrowser.GenericBrowser("w3m")


def window_browser() -> webbrowser.BaseBrowser:
    return webbrowser.BackgroundBrowser("xdg-open")


@pytest.mark.parametrize("token", ["", f"/t/{TOKEN}"])
def test_a_token_is_opened_and_not_shown(token: str, monkeypatch: pytest.MonkeyPatch):
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    page = RunPage(URL, f"{URL}{token}", {}, window_browser)
    page.open(within_s=10.0)
    assert opened == [f"{URL}{token}/dash/"]
    assert TOKEN not in page.shown_url + repr(page)
    assert token or page.shown_url == f"{URL}/dash/"


@pytest.mark.parametrize(
    ("find", "environment", "is_able"),
    [
        (no_browser, {}, False),
        (text_browser, {}, False),
        (text_browser, {"BROWSER": "w3m"}, True),
        (window_browser, {}, True),
    ],
)
def test_without_a_window_the_user_is_asked_to_open_the_page(find, environment, is_able):
    page = RunPage(URL, URL, environment, find)
    text = page.announcement(opens=True)
    assert text.startswith(f"page: {URL}/dash/")
    assert ("open it by hand" in text) != is_able
    assert page.announcement(opens=False) == f"page: {URL}/dash/"
