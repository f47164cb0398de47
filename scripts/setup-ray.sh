#!/usr/bin/env bash
# Install Ray in .venv-ray: tests/e2e/test_ray.py puts it beside the packages of .venv.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" ray 'import ray' "ray==2.60.0"
