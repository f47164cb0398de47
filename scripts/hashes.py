"""Write the hashes of all packages that the set-up scripts may install into the constraints files.

Run it after you change or add a version there: `.venv/bin/python scripts/hashes.py [FILE...]`. It uses uv's package
index (UV_DEFAULT_INDEX selects another).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

# Linux and macOS on 64 bits, CPython with a global lock. uv leaves out Pythons older than --python-version.
_USABLE = re.compile(r"(\.tar\.gz|\.zip|-any\.whl|[-.](many|musl)?linux\w*_(x86_64|aarch64)\.whl|[-.]macosx_\w+\.whl)$")
_OTHER_PYTHON = re.compile(r"-cp\d+t-|-pp\d+-|-graalpy")
_UV = Path(sys.prefix) / "bin" / "uv"


def add_hashes(constraints: Path) -> None:
    lines = constraints.read_text().splitlines()
    comments = [line for line in lines if line.startswith("#")]
    pins = [line.split()[0] for line in lines if line and not line.startswith("#")]
    flags = ["--no-deps", "--universal", "--python-version", "3.11", "--system-certs", "--format", "pylock.toml", "-"]
    environment = {name: value for name, value in os.environ.items() if name != "UV_FIND_LINKS"}
    run = subprocess.run(
        [_UV, "pip", "compile", "--quiet", *flags],
        input="\n".join(pins),
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    packages = tomllib.loads(run.stdout)["packages"]
    if len(packages) != len(pins):
        raise SystemExit(
            f"{constraints}: {len(pins)} lines, but {len(packages)} packages; is each NAME==VERSION, once?"
        )
    constraints.write_text("\n".join([*comments, *map(_line, packages)]) + "\n")


def _line(package: dict[str, Any]) -> str:
    files = [*package.get("wheels", []), *([package["sdist"]] if "sdist" in package else [])]
    names = {file["url"].rpartition("/")[2]: file["hashes"]["sha256"] for file in files}
    hashes = sorted(hash_ for name, hash_ in names.items() if _USABLE.search(name) and not _OTHER_PYTHON.search(name))
    if not hashes:
        raise SystemExit(f"{package['name']}=={package['version']} has no file for Linux or macOS: {sorted(names)}")
    return " ".join([f"{package['name']}=={package['version']}", *(f"--hash=sha256:{hash_}" for hash_ in hashes)])


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(Path(__file__).parents[1].glob("constraints*.txt")):
        add_hashes(path)
