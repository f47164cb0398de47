#!/usr/bin/env bash
# Install the real atroposlib in .venv-atropos: tests run its environments and trainer against Treadle's hub and engine.
# Its example_trainer imports torch, which atroposlib has only in an extra that also installs vLLM.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" atropos \
  'import atroposlib.envs.base, atroposlib.api.server, example_trainer.api' "atroposlib==0.4.0" "requests" "torch>=2.11,<2.14"
