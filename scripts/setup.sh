#!/usr/bin/env bash
# Set up .venv with the extras given as arguments ("train", "train,dev"); does nothing if it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
extras=${1:-train}
stamp=.ready-${extras//,/-}
make_venv .venv "$stamp" "treadle[$extras]" pyproject.toml constraints.txt constraints-build.txt
export UV_COMPILE_BYTECODE=1  # most of it is imported, by several processes at once
install .venv constraints.txt --editable ".[$extras]"
is_ready .venv "$stamp"
