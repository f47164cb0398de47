#!/usr/bin/env bash
# Install Debian's PostgreSQL server for the tests of the hub's queue in PostgreSQL, unless there is one. The tests start
# their own server, on a free port in a temporary folder; the one that the package starts is not used.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/venv.sh
if command -v postgres >/dev/null || compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null; then
  exit 0
fi
install_debian setup-postgres "PostgreSQL server" postgresql
compgen -G "/usr/lib/postgresql/*/bin/postgres" >/dev/null
