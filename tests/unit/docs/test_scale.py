"""The tables of docs/scale.md are what bench/layouts.py prints."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.doc_pages import ROOT


def test_the_arithmetic_of_the_page_is_that_of_the_code() -> None:
    command = [sys.executable, str(ROOT / "bench" / "layouts.py")]
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert len(tables) > 20
    assert [line for line in tables if line not in page] == [], "python bench/layouts.py prints the tables"
