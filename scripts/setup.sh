#!/usr/bin/env bash
# Makes .venv ready with the extras given as arguments ("train", "train,dev"); does nothing when it is ready already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extras=${1:-train}
unset PYTHONDONTWRITEBYTECODE  # without compiled files every process would spend seconds compiling its libraries

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "treadle needs Python 3.11 or newer; '$python' is older or missing. Set PYTHON=/path/to/python3.11" >&2
  exit 2
fi

wanted=$(cat pyproject.toml constraints.txt | sha256sum 2>/dev/null || cat pyproject.toml constraints.txt | shasum -a 256)
stamp=.venv/.ready-${extras//,/-}
if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then
  exit 0
fi
started=$SECONDS
if ! .venv/bin/python -m pip --version >/dev/null 2>&1; then  # absent, or its creation was interrupted
  rm -rf .venv
  echo "== creating .venv with $("$python" --version)"
  "$python" -m venv .venv
fi
echo "== installing treadle[$extras] into .venv (minutes the first time)"
.venv/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable ".[$extras]"
echo "$wanted" > "$stamp"
echo "== installed in $((SECONDS - started)) s"
