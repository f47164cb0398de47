#!/usr/bin/env bash
# Install the real verifiers and treadle in .venv-verifiers: tests run verifiers environments with Treadle's adapter.
# Includes its TextArena games, and uv, with which its harnesses download their programs' packages.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" verifiers \
  'import verifiers.v1, textarena, treadle.envs.foreign.verifiers' "verifiers[ta]==0.4.0" uv --editable .
