"""The script and the notebook of examples/ train for real, the notebook in a kernel of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.doc_pages import ROOT
from tests.e2e.processes import environment
from tests.e2e.test_docs import write_model

pytestmark = pytest.mark.full  # tests/unit/test_api.py goes up to where the processes would start
PARAMETERS = """
MODEL = "./my-model"
STEPS = 2
SETTINGS = {"max_token_length": 8, "group_size": 4, "batch_size": 8, "num_eval": 4, "reward_workers": 1,
            "engine": {"dtype": "float32", "max_num_seqs": 16}, "output": "runs"}
"""
TIMEOUT_S = 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, hidden_size=64, num_layers=2)
    return tmp_path


class Notebook:
    """A kernel that runs cells, as Jupyter does."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(cwd=str(folder), env=environment())
        self.printed = ""
        self.shown: list[dict[str, Any]] = []

    def run(self, source: str) -> dict[str, Any]:
        """The reply; `printed` and `shown` have what came before it."""
        self.printed, self.shown = "", []
        return self.client.execute_interactive(source, timeout=TIMEOUT_S, output_hook=self._take)["content"]

    def begin(self, source: str, until: str) -> None:
        """Start a cell and return when it has printed `until`."""
        self.printed, self.shown = "", []
        self.client.execute(source)
        deadline = time.monotonic() + TIMEOUT_S
        while until not in self.printed:
            assert time.monotonic() < deadline, self.printed
            self._take(self.client.get_iopub_msg(timeout=TIMEOUT_S))

    def _take(self, message: dict[str, Any]) -> None:
        content = message["content"]
        if message["msg_type"] == "stream":
            self.printed += content["text"]
        elif message["msg_type"] in ("execute_result", "display_data"):
            self.shown.append(content["data"])


@pytest.fixture
def notebook(folder: Path) -> Iterator[Notebook]:
    opened = Notebook(folder)
    yield opened
    opened.client.stop_channels()
    opened.manager.shutdown_kernel(now=True)


def test_the_script_of_the_examples_trains(folder: Path) -> None:
    source = (ROOT / "examples" / "own_reward.py").read_text()
    source, num_replaced = re.subn(r"(?ms)^MODEL = .*?^SETTINGS = [^\n]*\n", PARAMETERS, source)
    assert num_replaced == 1
    (folder / "script.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^What is \d+ \+ \d+\? ->", done.stdout, re.MULTILINE)
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_the_notebook_of_the_examples_runs_and_can_be_interrupted(folder: Path, notebook: Notebook) -> None:
    cells = json.loads((ROOT / "examples" / "first_run.ipynb").read_text())["cells"]
    shown = []
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        is_parameters = "parameters" in cell["metadata"].get("tags", ())
        reply = notebook.run(PARAMETERS if is_parameters else "".join(cell["source"]))
        assert reply["status"] == "ok", "\n".join(reply.get("traceback", ())) + notebook.printed
        shown += notebook.shown
    assert any("image/png" in data for data in shown), "the plot is shown"
    assert any("final_model" in data.get("text/plain", "") for data in shown)

    train = "treadle.train(MODEL, rewards=[is_right], data=rows, steps=1000, **SETTINGS)"
    notebook.begin(train, until="step   1/1000")
    notebook.manager.interrupt_kernel()
    reply = notebook.client.get_shell_msg(timeout=TIMEOUT_S)["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert re.fullmatch(r'stopped; continue with: treadle\.load\("runs/\S+"\)\.resume\(\)', reply["evalue"])
    left = psutil.Process(notebook.manager.provisioner.pid).children(recursive=True)
    assert not [child.cmdline() for child in left if "treadle" in child.cmdline()], "every process has ended"
    reply = notebook.run(
        "run = treadle.load(); print(run.is_complete, run.resume(steps=len(run.metrics) + 1).is_complete)"
    )
    assert reply["status"] == "ok", "\n".join(reply.get("traceback", ()))
    assert "False True" in notebook.printed
