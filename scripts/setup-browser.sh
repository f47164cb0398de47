#!/usr/bin/env bash
# Install Debian's headless Chromium for the tests in tests/browser, unless there is one. Playwright only controls it
# and downloads nothing.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    exit 0
  fi
done
install_debian setup-browser Chromium chromium-headless-shell
command -v chromium-headless-shell >/dev/null
