#!/usr/bin/env bash
# Set up .venv with the extras given as arguments ("train", "train,dev"); does nothing if it is up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
extras=${1:-train}
stamp=.ready-${extras//,/-}
make_venv .venv "$stamp" "treadle[$extras]" pyproject.toml constraints.txt constraints-build.txt
install .venv constraints.txt --editable ".[$extras]"
# Compile what trainer and engine import, once: they start at the same time. The rest is compiled when it is imported;
# compiling all of it took a minute of CPU, mostly for models of transformers that nobody imports.
.venv/bin/python -c 'import treadle.train.process, treadle.engines.server, transformers.models.llama.modeling_llama, peft'
is_ready .venv "$stamp"
