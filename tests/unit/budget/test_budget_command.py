"""`treadle plan` as a user meets it."""

from __future__ import annotations

import io
import json
import re
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from tests import doc_commands
from treadle import support
from treadle.budget.command import show_what_fits
from treadle.cli import main
from treadle.config import load_run
from treadle.config.values import explicit_keys
from treadle.errors import ConfigError, UserError
from treadle.gpus import Gpu
from treadle.launch.machine import read_machine_facts
from treadle.launch.preflight import checked_start


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """(exit code, what it printed, what it complained)."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.fixture(autouse=True)
def processor_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "processor_flags", lambda: frozenset({"amx_bf16"}))


def test_on_a_processor_without_bf16_weights_take_four_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "processor_flags", lambda: frozenset({"avx2"}))
    for device, num_bytes in (("cpu", 4), ("cuda", 2)):
        where = ("--gpu", "h200") if device == "cuda" else ("--train.device", "cpu")
        answer = json.loads(plan(capsys, *where, "--json")[1])
        sizes = {part["name"]: part["bytes"] for part in answer["places"][0]["components"]}
        assert sizes["weights"] == num_bytes * 134_515_008


def test_without_arguments_the_default_job_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = plan(capsys, "--train.device", "cpu", "--host-memory-gb", "16", "--json")
    answer = json.loads(printed)
    assert code == 0
    assert (answer["model"], answer["verdict"], answer["micro_tokens"]) == ("SmolLM2-135M", "fits", 1024)
    assert (answer["mode"], answer["warning"]) == ("single-copy", "")
    assert answer["places"][0]["peak"] == pytest.approx(5.31e9, rel=0.15)


def test_what_does_not_fit_ends_with_1_and_flags_that_do(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = plan(capsys, "--model", "Llama-3.1-8B", "--gpu", "h100")
    assert code == 1
    assert "does not fit: 181.2 GB too much" in printed
    assert "--train.optimizer adamw_8bit" in printed
    # Taking the suggestion: the answer is a plan that fits.
    flags = (
        "--train.optimizer adamw_8bit --train.gradient-checkpointing true --train.micro-tokens 4096 "
        "--engine.max-num-seqs 32"
    )
    code, printed, _ = plan(capsys, "--model", "Llama-3.1-8B", "--gpu", "h100", *flags.split())
    assert code == 0
    assert "\nfits: 6.07 GB left" in printed
    assert "largest micro" in printed


def test_the_runs_own_settings_are_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('model = "Qwen3-4B"\n[train]\nlora = true\nmicro_tokens = 4096\n[env]\nmax_token_length = 512\n')
    _, printed, _ = plan(capsys, "--config", str(file), "--gpu", "h200", "--json", "--train.micro-tokens", "2048")
    answer = json.loads(printed)
    assert (answer["model"], answer["mode"], answer["micro_tokens"]) == ("Qwen3-4B", "lora", 2048)
    assert answer["num_trained"] == 36 * 16 * ((2560 + 4096) + (2560 + 1024))


@pytest.mark.parametrize(
    ("words", "mode", "num_copies"),
    [
        ("--train.device cpu", "single-copy", 1),
        ("--train.device cpu --train.epochs 2", "two-copies", 2),
        ("--train.device cpu --train.lora", "lora", 2),
        ("--train.device cpu --train.weight-bridge-mode reload", "two-copies", 2),
        ("--gpu h100", "single-copy", 1),
        ("--gpu h100 --train.use-shared-memory", "two-copies", 2),
        ("--gpu h100 --train.epochs 2", "two-copies", 2),
        ("--gpu h100 --engine-gpus 1", "two-copies", 1),
        ("--gpu h100 --engine-gpus 1 --train.lora", "lora", 1),
        ("--gpu h100 --train.lora", "lora", 2),
        ("--gpu h100 --train.weight-bridge-mode offline", "none", 2),
    ],
)
def test_as_many_copies_are_planned_as_the_trainer_has(
    words: str, mode: str, num_copies: int, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed, _ = plan(capsys, *words.split(), "--json")
    answer = json.loads(printed)
    sizes = {part["name"]: part["bytes"] for part in answer["places"][0]["components"]}
    assert answer["mode"] == mode
    assert sizes["weights"] + sizes.get("engine's weights", 0) == num_copies * 2 * 134_515_008


def test_one_copy_on_a_gpu_takes_less_by_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "Qwen3-1.7B", "--gpu", "h200", "--json")
    one, two = (
        json.loads(plan(capsys, *words, *more)[1])["places"][0]["peak"] for more in ((), ("--mode", "two-copies"))
    )
    assert two - one == 2 * 1_720_574_976


def test_a_rollout_longer_than_a_micro_is_planned_whole(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model Qwen3-1.7B --gpu h200 --train.seq-len 40000 --env.max-token-length 30000 --prompt-tokens 1000"
    _, printed, _ = plan(capsys, *words.split(), "--json")
    answer = json.loads(printed)
    notes = {part["name"]: part["note"] for part in answer["places"][0]["components"]}
    assert (answer["micro_tokens"], answer["tokens_at_once"]) == (16_384, 31_000)
    assert notes["activations"] == "one rollout of 31,000 tokens, compiled"


def test_several_gpus_have_places_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model Qwen2.5-72B --cards 6xh100 --engine-gpus 4 --train.weight-bridge-mode lora_only --json"
    code, printed, _ = plan(capsys, *words.split())
    answer = json.loads(printed)
    assert code == 1
    assert answer["mode"] == "lora"
    assert answer["layout"]["engine"] == [0, 1, 2, 3]
    assert answer["layout"]["trainer"] == [4, 5]
    assert [place["name"] for place in answer["places"]] == ["trainer GPU", "engine GPU", "host"]
    assert [place["verdict"] for place in answer["places"]] == ["does not fit", "fits", "not known"]


def test_the_cards_of_a_machine_are_laid_out_and_the_command_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--cards 8xh100 --model Qwen3-14B --train.micro-tokens 4096"
    code, printed, _ = plan(capsys, *words.split())
    assert code == 0
    assert "GPU 0  engine          76.7 GB of 84.9 GB  fits" in printed
    assert "GPU 7  trainer rank 6  80.5 GB of 84.9 GB  fits" in printed
    assert "1 GPU holds the weights (29.5 GB) and 32 sequences; 7 train together" in printed
    command = "treadle run --model Qwen3-14B --train.micro-tokens 4096 --engine.gpus 0 --train.gpus 1-7"
    assert command in printed.splitlines()


def test_ranks_that_share_micros_leave_a_card_over(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--cards 4xh100 --model Qwen3-1.7B --train.context-parallel 2 --json"
    _, printed, _ = plan(capsys, *words.split())
    layout = json.loads(printed)["layout"]
    assert (layout["engine"], layout["trainer"]) == ([0], [1, 2])
    assert layout["reason"].endswith(
        "; 2 train together; GPU 3 is not used: context_parallel and replicas need a multiple of 2 trainer ranks"
    )


@pytest.mark.parametrize(
    ("words", "engine", "trainer"),
    [
        ("--cards h100 --model Qwen3-4B", 0, 1),
        ("--cards 2xh100 --model Qwen3-4B", 1, 1),
        ("--cards 8xh100 --model Qwen3-4B --train.single-copy true", 0, 1),
        ("--cards 6xh100 --model Qwen2.5-72B", 2, 4),
        ("--cards 8xh100 --model Qwen2.5-72B", 4, 4),
        ("--cards 8x192gb --model Qwen2.5-72B", 1, 7),
        ("--cards 8xh100 --model Qwen2.5-72B --engine.gpus 0-3 --train.gpus 4-5", 4, 2),
        ("--cards 4xh100 --model Qwen3-8B --train.ranks 2", 1, 2),
        ("--gpu h100 --model Qwen3-8B --train-gpus 5", 1, 5),
        ("--cards 4xh100 --model Qwen3-4B --engine-url http://gpu-7:9001 --train.ranks 4", 1, 4),
    ],
)
def test_engine_and_trainer_get_gpus(words: str, engine: int, trainer: int, capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = plan(capsys, *words.split(), "--json")
    answer = json.loads(printed)
    has_own = len(answer["places"]) == 3
    assert (len(answer["layout"]["engine"]) if has_own else 0, len(answer["layout"]["trainer"])) == (engine, trainer)


def test_a_size_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = plan(capsys, "--params", "24e9", "--gpu-memory-gb", "192", "--json")
    answer = json.loads(printed)
    assert answer["num_params"] == 24_000_000_000
    assert answer["places"][0]["capacity"] == 192_000_000_000


@pytest.mark.parametrize(
    ("words", "complaint", "remedy"),
    [
        (("--gpu", "h10"), "the GPU 'h10' is not known", "did you mean 'h100'?"),
        (("--model", "Qwen3-9B", "--gpu", "h100"), "is not known here", "--params 24e9"),
        (("--gpu", "h100", "--gpu-memory-gb", "80"), "by name and by size", "give only one"),
        (("--gpu-memory-gb", "-1"), "no size of a memory", "--gpu-memory-gb 80"),
        (("--train.device", "cpu", "--train-gpus", "2"), "has no GPU", "--gpu h100"),
        (("--gpu", "h100", "--mode", "single-copy", "--engine-gpus", "1"), "single GPU", "--mode two-copies"),
        (
            ("--gpu", "h100", "--mode", "single-copy", "--train.weight-bridge-mode", "lora_restart"),
            "one copy of the base model is for --train.weight-bridge-mode lora_only",
            "or --mode",
        ),
        (("--gpu", "h100", "--mode", "two-copies", "--train.lora", "true"), "do not go together", "leave --mode out"),
        (("--gpu", "h100", "--mode", "single-copy", "--train.epochs", "2"), "between the epochs", "--mode two-copies"),
        (("--gpu", "h100", "--train.optimizer", "sgd"), "train.optimizer", "correct --train.optimizer"),
        (("--gpu", "h100", "--prompt-tokens", "0"), "is no length", "--prompt-tokens 512"),
        (("--optimizer", "adamw"), "unknown flag --optimizer", "did you mean '--train.optimizer'?"),
        (("--model", "Qwen3-4B", "--gpu", "h100", "--engine-gpus", "3"), "cannot be divided among 3", "--engine-gpus"),
        (("--cards", "2xh100", "--train.ranks", "2", "--engine-gpus", "1"), "need 3 GPUs", "fewer trainer ranks"),
        (
            (
                "--cards",
                "0xh100",
            ),
            "is no number of GPUs",
            "8xh100",
        ),
        (
            ("--gpu", "h100", "--train-gpus", "3", "--train.replicas", "2"),
            "cannot be divided by it",
            "--train.replicas",
        ),
        (("--gpu", "h100", "--engine.tp", "2", "--engine-gpus", "4"), "contradict each other", "only one of them"),
        (("--gpu", "h100", "--env.group-size", "9"), "no multiple of env.group_size 9", "change one of them"),
        (("--gpu", "h100", "--train.single-copy", "--train-gpus", "2"), "single_copy cannot be with", ""),
        (("--gpu-memory-utilization", "0.5"), "unknown flag", "--engine.gpu-memory-utilization"),
    ],
)
def test_wrong_input_dies_with_a_remedy(
    words: tuple[str, ...], complaint: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, complained = plan(capsys, *words)
    assert code == 2
    assert complaint in complained
    assert remedy in complained


SPLIT = {"engine.tensor_parallel_size": "2"}


def test_run_refuses_to_share_the_memory_of_a_split_engine() -> None:
    with pytest.raises(ConfigError, match="cannot share its weights with a trainer"):
        load_run(None, SPLIT).check_together()
    for settings in ({"train.weight_bridge_mode": "lora_only"}, {"train.use_shared_memory": "true"}):
        load_run(None, SPLIT | settings).check_together()


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [({}, False), ({"train.use_shared_memory": "false"}, True), ({"train.weight_bridge_mode": "lora_only"}, False)],
)
def test_plan_and_run_agree_about_a_split_engine(
    settings: dict[str, str], is_refused: bool, tmp_path: Path, monkeypatch, capsys
) -> None:
    """On GPUs of its own the engine gets the weights by broadcast, unless the user refuses a second copy."""
    settings = {**SPLIT, "engine.engine": "vllm", "model": "Qwen3-4B", **settings}
    words = [word for key, value in settings.items() for word in (f"--{key.replace('_', '-')}", value)]
    _, _, by_plan = plan(capsys, "--gpu", "h100", *words)
    monkeypatch.setattr("treadle.launch.machine.may_use_gpu", lambda _: True)
    monkeypatch.setattr("treadle.launch.machine.find_gpus", lambda _: (Gpu("H100", 79 * 2**30),) * 3)
    monkeypatch.setattr("treadle.launch.preflight.find_vllm", lambda _: None)
    config = load_run(None, {**settings, "output": str(tmp_path)})
    by_run = ""
    try:
        with checked_start(config, explicit_keys(config), print, read_machine_facts({})):
            pass
    except UserError as error:
        by_run = str(error)
    for complaint in (by_plan, by_run):
        assert ("--train.use-shared-memory true" in complaint) == is_refused


QUESTIONS = (
    "--train.device cpu --host-memory-gb 16",
    "--model Llama-3.1-8B --gpu h100",
    "--model Llama-3.1-8B --gpu h100 --train.single-copy true",
    "--model Qwen3-0.6B --gpu h100 --engine-gpus 1 --env.name gsm8k --env.system-prompt 'think first'",
    "--model Qwen3-4B --gpu h100 --train.weight-bridge-mode reload",
    "--model Qwen3-8B --gpu h100 --engine-gpus 2 --train.weight-bridge-mode lora_only --train.micro-tokens 4096",
    "--model Qwen3-0.6B --gpu h100 --train-gpus 2 --steps 50 --train.seq-len 4096",
    "--model Qwen3-14B --gpu h100 --train-gpus 5 --engine-gpus 1",
    "--model Qwen3-0.6B --gpu h100 --train.ranks 2 --train.device cuda:0 --config configs/gsm8k.toml",
    "--model Qwen3-8B --gpu h100 --train-gpus 2 --engine-gpus 2 --train.weight-bridge-mode lora_only",
    "--model Qwen3-14B --cards 8xh100",
    "--model Qwen2.5-72B --gpu h100 --train-gpus 2 --engine-gpus 4",
    "--model Qwen3-0.6B --gpu h100 --mode two-copies --engine.gpu-memory-utilization 0.3",
    "--model Qwen3-1.7B --gpu h100 --engine.gpu-memory-utilization 0.9",
    "--model Qwen3-0.6B --gpu h100 --mode none --hub-url http://127.0.0.1:8000",
)


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_command_that_plan_prints_is_taken(question: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """By the parsers and the checks of its verb; a plan of a suggestion prints commands that are taken, too."""
    doc_commands.places(tmp_path, monkeypatch)
    asked = shlex.split(question)
    answer = json.loads(plan(capsys, *asked, "--json")[1])
    commands = [answer["command"], *(offer["command"] for offer in answer["suggestions"])]
    assert any(commands)
    shown = plan(capsys, *asked)[1].splitlines()
    assert answer["command"] in shown  # a whole line, to be copied
    for command in filter(None, commands):
        parsed = doc_commands.treadle_words(shlex.split(command))
        assert parsed is not None, command
        code, output = doc_commands.parse(parsed, monkeypatch, capsys)
        assert not code, (command, output)
    any_number = [word.replace("8xh100", "h100") for word in asked]  # a suggestion may need more GPUs
    for offer in answer["suggestions"]:
        words = any_number if "--engine.gpus" in offer["flags"] else asked
        code, printed, complained = plan(capsys, *words, *shlex.split(offer["flags"]), "--json")
        assert code == 0, (offer, complained)
        assert json.loads(printed)["verdict"] == offer["verdict"]


def test_a_plan_counts_with_the_defaults_of_its_task(capsys: pytest.CaptureFixture[str]) -> None:
    """As the run does: completions of gsm8k have 2048 tokens."""
    asked = ("--model", "Qwen3-0.6B", "--gpu", "h100", "--env.name", "gsm8k", "--json")
    _, by_default, _ = plan(capsys, *asked)
    _, by_flag, _ = plan(capsys, *asked, "--env.max-token-length", "2048")
    assert json.loads(by_default)["places"] == json.loads(by_flag)["places"]


@pytest.mark.parametrize("columns", ["60", "80"])
def test_no_word_of_a_plan_is_cut_off_on_a_narrow_terminal(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    code, printed, _ = plan(capsys, "--model", "Qwen3-8B", "--gpu", "H100 80GB")
    assert code in (0, 1)
    assert "…" not in printed
    assert {"accumulators", "compiled", "masters"} <= set(printed.split())


def shown_after(
    monkeypatch: pytest.MonkeyPatch, model: str, gpus: tuple[Gpu, ...], *, of_host: bool = False, **settings: str
) -> str:
    monkeypatch.setattr("treadle.budget.request.find_gpus", lambda _: gpus)
    monkeypatch.setattr("treadle.budget.request.host_memory", lambda: 64 * 2**30)
    console = Console(record=True, width=120, file=io.StringIO())
    dotted = {key.replace("__", "."): value for key, value in settings.items()}
    show_what_fits(load_run(None, {"model": model, **dotted}), console, of_host=of_host)
    return console.export_text()


def offered(shown: str, place: str) -> list[float]:
    """Gigabytes of what is offered."""
    return [float(size) for size in re.findall(rf"^ .*\b{place} ([0-9.]+) GB", shown, re.MULTILINE)]


def total(shown: str) -> float:
    """Of the first place."""
    return float(re.findall(r"^total +([0-9.]+) GB", shown, re.MULTILINE)[0])


H200 = (Gpu("H200", 139 * 2**30),)


def test_after_a_run_that_did_not_fit_flags_that_fit_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_after(monkeypatch, "Qwen3-1.7B", (Gpu("H100", 79 * 2**30),))
    assert "does not fit: 19.3 GB too much" in shown
    assert "--train.micro-tokens 8192" in shown
    assert "there is room" not in shown


@pytest.mark.parametrize("has_vllm", [False, True])
@pytest.mark.parametrize(("gpus", "place"), [((), "host"), (H200, "trainer GPU")])
def test_after_a_run_whose_plan_fits_flags_with_a_quarter_less_are_shown(
    monkeypatch: pytest.MonkeyPatch, gpus: tuple[Gpu, ...], place: str, has_vllm: bool
) -> None:
    monkeypatch.setattr("treadle.budget.request.has_vllm", lambda _: has_vllm and bool(gpus))
    shown = shown_after(monkeypatch, "Qwen3-0.6B", gpus)
    assert "By this plan there is room" in shown
    sizes = offered(shown, place)
    assert len(sizes) > 1
    assert max(sizes) <= 0.755 * total(shown)
    assert "as it is" not in shown
    assert ("--engine.gpu-memory-utilization" in shown) == (has_vllm and bool(gpus))


def test_after_a_process_was_killed_flags_need_less_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = shown_after(monkeypatch, "Qwen3-0.6B", H200, of_host=True, train__optimizer="adamw_cpu")
    sizes = offered(shown, "host")
    assert sizes
    assert max(sizes) <= 0.755 * float(re.findall(r"^total +([0-9.]+) GB", shown, re.MULTILINE)[-1])


def test_completions_longer_than_the_defaults_are_planned_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    short, long = (
        total(shown_after(monkeypatch, "Qwen3-0.6B", H200, env__max_token_length=length)) for length in ("512", "8192")
    )
    assert long > 1.5 * short


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ({"engine__tensor_parallel_size": "2", "train__weight_bridge_mode": "lora_only"}, "each of GPUs 0-1: a worker"),
        ({"engine__device": "cuda:1"}, "GPU 1: the engine"),
        ({"engine__gpus": "1-2", "train__gpus": "0", "train__use_shared_memory": "true"}, "each of GPUs 1-2: a worker"),
        ({"engine_url": "http://gpu-7:9001"}, ": the engine"),
    ],
)
def test_an_engine_on_other_cards_is_planned_there(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], title: str
) -> None:
    shown = shown_after(monkeypatch, "Qwen3-0.6B", 3 * H200, **settings)
    assert title in shown
    assert "with the engine" not in shown


def test_a_model_of_unknown_shape_has_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_after(monkeypatch, "somebody/something", ()).startswith("no plan of its memory: the shape of")
