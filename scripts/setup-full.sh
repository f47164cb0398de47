#!/usr/bin/env bash
# Install what only the tests marked `full` need, unless it is there: Debian's SLURM and Firefox. The tests start SLURM's
# daemons themselves. scripts/setup-ray.sh installs Ray for them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
for name in munged slurmctld slurmd sbatch firefox-esr; do
  if ! command -v "$name" >/dev/null; then
    install_debian setup-full "SLURM or no Firefox" munge slurmctld slurmd slurm-client firefox-esr
    break
  fi
done
