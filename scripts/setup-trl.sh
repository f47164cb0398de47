#!/usr/bin/env bash
# Install TRL in .venv-trl: bench/laptop.py compares Treadle's training step with it.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" trl 'from trl import GRPOConfig, GRPOTrainer' "trl==1.16.0" "torch>=2.11,<2.14"
