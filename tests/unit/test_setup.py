"""What a set-up installs is listed with hashes, and nothing else is installed. Offline, with packages made here."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from treadle.envs.rewards.addresses import load_address
from treadle.envs.rewards.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
UV = Path(sys.prefix) / "bin" / "uv"  # the set-up leaves it there


def test_every_line_of_the_constraints_names_a_version_and_its_hashes():
    files = sorted(ROOT.glob("constraints*.txt"))
    assert files
    for file in files:
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        without = [
            line[:60] for line in lines if not re.fullmatch(r"[a-z0-9-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line)
        ]
        assert without == [], file.name


def test_the_quickstart_installs_what_the_built_in_rewards_need():
    extras = re.search(r"scripts/setup\.sh (\S+)", (ROOT / "quickstart").read_text())
    needed = {load_address(address).needs[0] for address in BUILT_IN.values() if load_address(address).needs}
    assert needed == {"envs", "train"}
    assert extras is not None
    assert needed <= set(extras[1].split(","))


class Setup:
    """An empty environment, and a folder of packages that uv finds."""

    def __init__(self, folder):
        self.folder, self.packages = folder, folder / "packages"
        self.packages.mkdir()
        self.places = {"UV_FIND_LINKS": str(self.packages), "UV_NO_INDEX": "1", "UV_CACHE_DIR": str(folder / "cache")}
        self.run([UV, "venv", "--quiet", "--python", sys.executable, folder / "venv"])

    def run(self, command):
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **self.places},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def publish(self, name, version, needs=""):
        """Make a wheel; returns its hash."""
        about = f"{name}-{version}.dist-info"
        files = {
            f"{name}.py": f"version = {version!r}\n",
            f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            + (f"Requires-Dist: {needs}\n" if needs else ""),
            f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        record = "".join(f"{path},,\n" for path in [*files, f"{about}/RECORD"])
        wheel = self.packages / f"{name}-{version}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for path, content in {**files, f"{about}/RECORD": record}.items():
                archive.writestr(path, content)
        return hashlib.sha256(wheel.read_bytes()).hexdigest()

    def install(self, name, **hashes):
        """By the set-up's own function, with version 1.0 of the packages in `hashes` as constraints."""
        constraints = self.folder / "constraints.txt"
        constraints.write_text("".join(f"{listed}==1.0 --hash=sha256:{hash_}\n" for listed, hash_ in hashes.items()))
        script = 'set -euo pipefail; source scripts/venv.sh; install_checked "$@"'
        return self.run(["bash", "-c", script, "bash", UV, self.folder / "venv", constraints, name])

    def installed(self):
        found = (self.folder / "venv").glob("lib/python*/site-packages/*.dist-info")
        return sorted(path.name.removesuffix(".dist-info") for path in found)


@pytest.fixture
def setup(tmp_path):
    if not UV.exists():
        pytest.skip("uv is not installed in this environment")
    return Setup(tmp_path)


def test_a_set_up_installs_files_whose_hashes_match(setup):
    part = setup.publish("part", "1.0")
    whole = setup.publish("whole", "1.0", needs="part")
    run = setup.install("whole", whole=whole, part=part)
    assert (run.returncode, setup.installed()) == (0, ["part-1.0", "whole-1.0"]), run.stderr


def test_a_set_up_refuses_a_file_with_another_hash(setup):
    setup.publish("part", "1.0")
    whole = setup.publish("whole", "1.0", needs="part")
    run = setup.install("whole", whole=whole, part="0" * 64)
    assert (run.returncode, setup.installed()) == (1, [])
    assert "Hash mismatch for `part==1.0`" in run.stderr
    assert "the file is not the one that these versions were tested with" in run.stderr


def test_a_set_up_refuses_a_package_that_is_not_listed(setup):
    setup.publish("part", "1.0")
    whole = setup.publish("whole", "1.0", needs="part")
    run = setup.install("whole", whole=whole)
    assert (run.returncode, setup.installed()) == (1, [])
    assert "constraints.txt has no version and hash of part\n" in run.stderr


def test_only_torch_may_be_a_build_of_the_users_own_and_that_is_said(setup):
    published = {name: setup.publish(name, "1.0") for name in ("part", "torch")}
    setup.publish("part", "1.0+theirs")
    setup.publish("torch", "1.0+cpu")
    run = setup.install("part", **published)
    assert (run.returncode, setup.installed()) == (1, [])
    run = setup.install("torch", **published)
    assert (run.returncode, setup.installed()) == (0, ["torch-1.0+cpu"]), run.stderr
    assert "torch==1.0+cpu is a build" in run.stderr
    assert "not checked" in run.stderr
