# Sourced by the setup scripts, from the project's folder: what making an environment ready has in common.
unset PYTHONDONTWRITEBYTECODE  # without compiled files every process would spend seconds compiling its libraries
python=${PYTHON:-python3}

# make_venv VENV STAMP WHAT FILE...: ends the script when STAMP says that VENV is ready for these files; else sees that
# VENV is there. WHAT is named to a user whose Python is too old.
make_venv() {
  local venv=$1 stamp=$2 what=$3
  if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    echo "$what needs Python 3.11 or newer; '$python' is older or missing. Set PYTHON=/path/to/python3.11" >&2
    exit 2
  fi
  wanted=$({ echo "$what"; cat "${@:4}"; } | { sha256sum 2>/dev/null || shasum -a 256; })
  if [ "$(cat "$venv/$stamp" 2>/dev/null)" = "$wanted" ]; then
    exit 0
  fi
  started=$SECONDS
  if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then  # absent, or its creation was interrupted
    rm -rf "$venv"
    echo "== creating $venv with $("$python" --version)"
    "$python" -m venv "$venv"
  fi
  echo "== installing $what into $venv (minutes the first time)"
}

# is_ready VENV STAMP: next time there is nothing to do.
is_ready() {
  echo "$wanted" > "$1/$2"
  echo "== installed in $((SECONDS - started)) s"
}
