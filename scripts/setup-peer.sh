#!/usr/bin/env bash
# Makes .venv-NAME ready: another project's package in an environment of its own, because it wants other versions than
# ours, pinned by constraints-NAME.txt. Does nothing when it is ready.
#   scripts/setup-peer.sh NAME 'python that must run' PACKAGE...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # without compiled files every process would spend seconds compiling its libraries
name=$1 proof=$2
wanted=("${@:3}")
venv=.venv-$name constraints=constraints-$name.txt

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "${wanted[0]} as pinned needs Python 3.11 or newer; '$python' is older or missing. Set PYTHON=/path/to/python3.11" >&2
  exit 2
fi

pinned=$({ echo "${wanted[@]}"; cat "$constraints"; } | { sha256sum 2>/dev/null || shasum -a 256; })
stamp=$venv/.ready
if [ "$(cat "$stamp" 2>/dev/null)" = "$pinned" ]; then
  exit 0
fi
started=$SECONDS
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # absent, or its creation was interrupted
  rm -rf "$venv"
  echo "== creating $venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
echo "== installing ${wanted[0]} into $venv (minutes the first time)"
# Most of its libraries are never imported here: compiling all of them would take a third of the time.
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile --constraint "$constraints" "${wanted[@]}"
"$venv/bin/python" -c "$proof"
echo "$pinned" > "$stamp"
echo "== installed in $((SECONDS - started)) s"
