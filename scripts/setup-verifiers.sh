#!/usr/bin/env bash
# The real verifiers beside treadle itself, in .venv-verifiers: the tests run environments of its kind by our adapter.
# With its games of TextArena, and uv, by which its harnesses fetch their programs' packages.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" verifiers \
  'import verifiers.v1, textarena, treadle.envs.foreign.verifiers' "verifiers[ta]==0.4.0" uv --editable .
