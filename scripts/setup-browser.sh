#!/usr/bin/env bash
# Install Debian's headless Chromium for the tests in tests/browser, unless there is one. Playwright only controls it
# and downloads nothing.
set -euo pipefail
for name in chromium-headless-shell chromium chromium-browser google-chrome; do
  if command -v "$name" >/dev/null; then
    exit 0
  fi
done
package=chromium-headless-shell
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "setup-browser: there is no Chromium for tests/browser; install one: sudo apt-get install $package (or chromium)" >&2
  exit 1
fi
echo "setup-browser: installing $package"
export DEBIAN_FRONTEND=noninteractive
# On a newly created machine another apt-get may still be running: wait for it.
apt-get -q -o DPkg::Lock::Timeout=300 update >/dev/null
apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "$package" >/dev/null
command -v "$package" >/dev/null
