#!/usr/bin/env bash
# Set up .venv-NAME: another project's package in a separate virtual environment, because it needs other versions than
# Treadle, pinned by constraints-NAME.txt. Does nothing if it is up to date.
#   scripts/setup-peer.sh NAME 'python that must run' PACKAGE...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
name=$1 proof=$2
venv=.venv-$name constraints=constraints-$name.txt
make_venv "$venv" .ready "${*:3}" pyproject.toml "$constraints" constraints-build.txt
install "$venv" "$constraints" "${@:3}"
"$venv/bin/python" -c "$proof"
is_ready "$venv" .ready
