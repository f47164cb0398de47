"""The doctor looks for real: two processes that share memory, the command line, a hub that serves, a stranger."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.hub_process import HubProcess
from tests.tiny_model import write_tiny_model
from tests.written_run import write_run
from treadle.config.load import save_run
from treadle.config.values import with_values
from treadle.doctor.command import DoctorTarget, check_live
from treadle.doctor.live import check_engine, check_hub
from treadle.doctor.survey import SharingResult, list_packages, survey_model, try_sharing
from treadle.formatting import Finding
from treadle.launch.folder import locked
from treadle.net.access_tokens import role_token
from treadle.net.probe import ServerProbe


def doctor(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    quiet = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    return subprocess.run(
        [sys.executable, "-m", "treadle", "doctor", *words],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **quiet, **env},
    )  # fmt: skip


def by_name(checks: list[Finding]) -> dict[str, Finding]:
    return {check.name: check for check in checks}


def test_two_real_processes_share_weights_in_main_memory(tmp_path: Path) -> None:
    trials = try_sharing(tmp_path)
    assert trials.torch.error == ""
    assert trials.results[0] == SharingResult("cpu")
    assert list(tmp_path.iterdir()) == []


def test_processes_that_do_not_answer_are_ended_at_the_deadline(tmp_path: Path) -> None:
    trials = try_sharing(tmp_path, deadline_s=0.05)
    assert trials.results == ()
    assert trials.torch.error == "no answer within 0 s"


def test_a_torch_that_does_not_load_is_reported_in_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    output = try_sharing(tmp_path).torch.error
    assert output == "a process ended (exit code 1): ImportError: libcudart.so.13: cannot open shared object file"


def test_json_is_one_object_and_nothing_else() -> None:
    done = doctor("--json", PYTORCH_ALLOC_CONF="", TREADLE_HUB_TOKEN="a-secret-that-is-long-enough")
    output = json.loads(done.stdout)
    assert set(output) == {"ok", "checks"}
    assert done.returncode == (0 if output["ok"] else 1)
    assert all(set(check) == {"name", "verdict", "found", "remedy"} for check in output["checks"])
    names = [check["name"] for check in output["checks"]]
    assert len(names) == len(set(names))
    assert {"Python", "torch", "vLLM", "weights in shared memory", "open files", "clock", "tokens"} <= set(names)
    assert "TREADLE_HUB_TOKEN set" in done.stdout
    assert "a-secret" not in done.stdout + done.stderr


@pytest.mark.parametrize(("words", "is_reported"), [((), True), (("--json",), False)])
def test_a_terminal_shows_what_is_being_tried_and_nothing_else_does(words: tuple[str, ...], is_reported: bool) -> None:
    command = [sys.executable, "-m", "treadle", "doctor", "--hub", "http://127.0.0.1:1", *words]
    ours, theirs = os.openpty()
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, text=True, timeout=60, check=False)
    finally:
        os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        received = b""
        with contextlib.suppress(OSError):  # how a terminal tells that nobody is at its other end
            while part := terminal.read(4096):
                received += part
    assert (b"asking the hub at http://127.0.0.1:1" in received) == is_reported
    assert "asking the hub" not in done.stdout
    assert doctor("--hub", "http://127.0.0.1:1", *words).stderr == ""


def test_a_problem_is_the_exit_code_and_has_its_remedy(tmp_path: Path) -> None:
    done = doctor("--json", "--model", str(tmp_path / "nothing"), TREADLE_ENGINE_TOKEN="short")
    output = json.loads(done.stdout)
    bad = {check["name"]: check for check in output["checks"] if check["verdict"] == "problem"}
    assert (done.returncode, output["ok"]) == (1, False)
    assert bad[f"model {tmp_path / 'nothing'}"]["remedy"] == "check --model"
    assert "shorter than 16 characters" in bad["tokens"]["found"]


def test_a_model_folder_is_whole_or_its_missing_part_is_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "model")
    model, _ = survey_model(str(folder))
    assert (model.kind, model.is_here, model.missing, model.error) == ("folder", True, (), "")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert survey_model(str(folder))[0].missing == ("model-00002.safetensors",)
    (folder / "pytorch_model.bin").touch()
    assert "pytorch_model.bin, which can run code" in survey_model(str(folder))[0].error


def test_the_packages_of_a_python_are_listed_with_what_they_ask_for() -> None:
    found = list_packages(sys.executable)
    assert found.python_version == sys.version_info[:3]
    assert "torch" in found.versions
    assert any(line.startswith("torch") for line in found.requires["treadle"])


def test_a_live_hub_says_why_there_is_no_batch(tmp_path: Path) -> None:
    with HubProcess(tmp_path) as hub:
        checks = by_name(check_hub(ServerProbe("hub", hub.url)))
        assert checks["hub"].verdict == "ok"
        assert checks["batches"].found.startswith("no trainer has registered")
        assert checks["process hub"].verdict == "ok"
        done = doctor("--json", "--hub", hub.url)
        assert done.returncode == 0, done.stdout
        (not_an_engine,) = [check for check in check_engine(ServerProbe("engine", hub.url)) if "generate" in check.name]
        assert not_an_engine.verdict == "problem"
        assert "404" in not_an_engine.found
        assert "`treadle engine --port N`" in not_an_engine.remedy


def test_a_hub_with_a_token_asks_for_its_variable(tmp_path: Path) -> None:
    with HubProcess(tmp_path, env={"TREADLE_HUB_TOKEN": "0123456789abcdef0123"}) as hub:
        refused = check_hub(ServerProbe("hub", hub.url, "", "TREADLE_HUB_TOKEN"))[-1]
        assert (refused.verdict, refused.remedy) == ("problem", "export TREADLE_HUB_TOKEN=...")
        known = check_hub(ServerProbe("hub", hub.url, "0123456789abcdef0123", "TREADLE_HUB_TOKEN"))
        assert all(check.verdict == "ok" for check in known)


def test_a_runs_own_token_files_open_its_hub_and_its_engine(
    tmp_path: Path, stranger: tuple[str, dict[str, tuple[int, Any]]]
) -> None:
    engine_url, answers = stranger
    answers |= {"/health": (200, {"status": "ok", "policy_version": 3}), "/generate": (200, {})}
    files = {name: tmp_path / f"{name}.token" for name in ("hub", "engine")}
    files["engine"].write_text("engine-token-of-a-test-0123")
    files["engine"].chmod(0o600)
    with HubProcess(tmp_path, "--token-file", str(files["hub"])) as hub, locked(tmp_path):
        urls = {"env.hub_url": hub.url, "train.engine_url": engine_url}
        settings = urls | {f"{name}.token_file": file for name, file in files.items()}
        save_run(with_values(write_run(tmp_path), settings), tmp_path / "config.json")
        found = by_name(check_live(DoctorTarget(tmp_path), {}))
        assert {found[name].verdict for name in ("hub", "batches", "engine", "POST /generate")} == {"ok"}
        assert Stranger.keys_seen == {f"Bearer {role_token('engine-token-of-a-test-0123', 'environment')}"}
        given = by_name(check_live(DoctorTarget(tmp_path, hub_url=hub.url), {}))
        assert given["hub"].verdict == "problem", "an address that was given gets no token of the run"
        files["hub"].chmod(0o644)
        assert by_name(check_live(DoctorTarget(tmp_path), {}))["tokens"].remedy == f"chmod 600 {files['hub']}"


def test_nobody_at_an_address_is_reported_with_the_command_that_starts_one() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # taken, and nobody listens
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        done = doctor("--hub", url, "--engine", url)
    assert done.returncode == 1
    assert "2 problems" in done.stdout


class Stranger(BaseHTTPRequestHandler):
    """An OpenAI server as there are many: it has /health and /v1, and no /generate."""

    answers: ClassVar[dict[str, tuple[int, Any]]] = {}
    keys_seen: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        self.keys_seen.add(self.headers["Authorization"])
        self._answer(*self.answers.get(self.path, (404, {"detail": "Not Found"})))

    do_POST = do_GET

    def _answer(self, status: int, body: Any) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def stranger() -> Iterator[tuple[str, dict[str, tuple[int, Any]]]]:
    answers: dict[str, tuple[int, Any]] = {}
    Stranger.keys_seen.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Other", (Stranger,), {"answers": answers}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", answers
    server.shutdown()
    server.server_close()


def test_404_on_generate_is_reported_with_the_wrong_base_url(stranger: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    url, answers = stranger
    answers["/health"] = (200, {"status": "ok", "policy_version": 3})
    alive, generate = check_engine(ServerProbe("engine", url))
    assert (alive.verdict, generate.verdict) == ("ok", "problem")
    assert "not a treadle engine" in generate.found
    with_path = by_name(check_engine(ServerProbe("engine", f"{url}/api")))
    assert with_path["POST /generate"].remedy == f"leave the path out: {url}"


def test_a_server_that_accepts_and_never_answers_is_called_stuck() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        answer = ServerProbe("engine", url).ask("/health", timeout_s=0.2)
        assert (answer.status, answer.is_late) == (0, True)
        (check,) = check_hub(ServerProbe("hub", url, timeout_s=0.2))
    assert check.verdict == "problem"
    assert "kill -USR1" in check.remedy


def test_an_engine_that_failed_says_why(stranger: tuple[str, dict[str, tuple[int, Any]]]) -> None:
    url, answers = stranger
    answers["/health"] = (503, {"status": "failed: vLLM has died"})
    (check,) = check_engine(ServerProbe("engine", url))
    assert check.verdict == "problem"
    assert "vLLM has died" in check.found


def test_the_logs_of_a_run_that_ended_are_read(tmp_path: Path) -> None:
    save_run(write_run(tmp_path), tmp_path / "config.json")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "engine.log").write_text("loading\ntorch.OutOfMemoryError: CUDA out of memory.\n")
    done = doctor("--json", str(tmp_path))
    output = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert done.returncode == 1
    assert "is not going on" in output["run"]["found"]
    assert output["log of the engine"]["found"].startswith("the GPU's memory is full")
    assert doctor(str(tmp_path / "logs")).returncode == 2
