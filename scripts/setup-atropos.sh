#!/usr/bin/env bash
# The real atroposlib in .venv-atropos: the tests run its environments and trainer against our hub and engine.
# Its example_trainer imports torch, which atroposlib leaves to an extra that would also bring vLLM.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" atropos \
  'import atroposlib.envs.base, atroposlib.api.server, example_trainer.api' "atroposlib==0.4.0" "requests" "torch>=2.11,<2.14"
