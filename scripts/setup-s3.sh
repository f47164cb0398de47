#!/usr/bin/env bash
# Install moto's S3 server in .venv-s3: tests copy checkpoints to it. Its boto3 needs an older dateutil than Treadle has.
exec "$(dirname "${BASH_SOURCE[0]}")/setup-peer.sh" s3 'import moto.server' "moto[s3]==5.2.5" "flask" "flask-cors"
