#!/usr/bin/env bash
# Makes .venv-atropos ready: the real atroposlib, whose environments and trainer the tests run against our hub and
# engine. It has an environment of its own because it wants other versions than ours. Does nothing when it is ready.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # without compiled files every process would spend seconds compiling its libraries

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "atroposlib's pinned set needs Python 3.11 or newer; '$python' is older or missing. Set PYTHON=/path/to/python3.11" >&2
  exit 2
fi

# Its example_trainer imports torch, which atroposlib leaves to an extra that would also bring vLLM.
wanted=("atroposlib==0.4.0" "requests" "torch>=2.11,<2.14")
pinned=$({ echo "${wanted[@]}"; cat constraints-atropos.txt; } | { sha256sum 2>/dev/null || shasum -a 256; })
stamp=.venv-atropos/.ready
if [ "$(cat "$stamp" 2>/dev/null)" = "$pinned" ]; then
  exit 0
fi
started=$SECONDS
if ! .venv-atropos/bin/python -m pip --version >/dev/null 2>&1; then  # absent, or its creation was interrupted
  rm -rf .venv-atropos
  echo "== creating .venv-atropos with $("$python" --version)"
  "$python" -m venv .venv-atropos
fi
echo "== installing atroposlib into .venv-atropos (minutes the first time)"
# Most of its libraries are never imported here: compiling all of them would take a third of the time.
.venv-atropos/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
  --constraint constraints-atropos.txt "${wanted[@]}"
.venv-atropos/bin/python -c 'import atroposlib.envs.base, atroposlib.api.server, example_trainer.api'
echo "$pinned" > "$stamp"
echo "== installed in $((SECONDS - started)) s"
