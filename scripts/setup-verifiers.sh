#!/usr/bin/env bash
# The real verifiers beside treadle itself, in .venv-verifiers: the tests run an environment of its kind by our adapter.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" verifiers \
  'import verifiers.v1, treadle.envs.foreign.verifiers' "verifiers==0.4.0" --editable .
