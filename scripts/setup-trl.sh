#!/usr/bin/env bash
# Makes .venv-trl ready: TRL, beside which bench/laptop.py measures our training step. It has an environment of its own
# because it wants a newer transformers than ours. Does nothing when it is ready.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # without compiled files every process would spend seconds compiling its libraries

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "TRL's pinned set needs Python 3.11 or newer; '$python' is older or missing. Set PYTHON=/path/to/python3.11" >&2
  exit 2
fi

wanted=("trl==1.16.0" "torch>=2.11,<2.14")
pinned=$({ echo "${wanted[@]}"; cat constraints-trl.txt; } | { sha256sum 2>/dev/null || shasum -a 256; })
stamp=.venv-trl/.ready
if [ "$(cat "$stamp" 2>/dev/null)" = "$pinned" ]; then
  exit 0
fi
started=$SECONDS
if ! .venv-trl/bin/python -m pip --version >/dev/null 2>&1; then  # absent, or its creation was interrupted
  rm -rf .venv-trl
  echo "== creating .venv-trl with $("$python" --version)"
  "$python" -m venv .venv-trl
fi
echo "== installing TRL into .venv-trl (minutes the first time)"
# Most of its libraries are never imported here: compiling all of them would take a third of the time.
.venv-trl/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
  --constraint constraints-trl.txt "${wanted[@]}"
.venv-trl/bin/python -c 'from trl import GRPOConfig, GRPOTrainer'
echo "$pinned" > "$stamp"
echo "== installed in $((SECONDS - started)) s"
