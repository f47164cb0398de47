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

# install VENV FLAG... PACKAGE...: by uv, which takes seconds where pip takes minutes, and shares what environments have in
# common; by pip where uv cannot do it. UV_COMPILE_BYTECODE=1 compiles what was installed.
install() {
  local venv=$1; shift
  if install_by_uv "$venv" "$@"; then
    return
  fi
  echo "== uv could not install it; pip is asked (this takes longer)" >&2
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}

install_by_uv() {
  local venv=$1; shift
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "uv==0.13.7" || return 1
  take_over "$venv" UV_FIND_LINKS "${PIP_FIND_LINKS:-}" find-links ,
  take_over "$venv" UV_DEFAULT_INDEX "${PIP_INDEX_URL:-}" index-url ' '
  take_over "$venv" UV_INDEX "${PIP_EXTRA_INDEX_URL:-}" extra-index-url ' '
  take_over "$venv" UV_NO_INDEX "${PIP_NO_INDEX:-}" no-index ' '
  take_over "$venv" SSL_CERT_FILE "${PIP_CERT:-}" cert ' '
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}  # as with pip, no index comes before another
  warn_of_cuda "$venv" "$@"
  VIRTUAL_ENV=$PWD/$venv "$venv/bin/uv" pip install --system-certs --quiet "$@"
}

# warn_of_cuda VENV FLAG... PACKAGE...: one line before gigabytes are downloaded that a machine without a GPU cannot use.
warn_of_cuda() {
  local venv=$1; shift
  if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
    return
  fi
  if VIRTUAL_ENV=$PWD/$venv "$venv/bin/uv" pip install --system-certs --dry-run "$@" 2>&1 | grep '^ + nvidia-' >/dev/null; then
    echo "== this machine has no NVIDIA GPU, but for $("$venv/bin/python" --version) only the CUDA build of torch was found (about 5 GB)." \
      "To avoid it: let pip find a CPU build (a version that ends in +cpu) by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, or use another PYTHON" >&2
  fi
}

# take_over VENV NAME VALUE SETTING SEPARATOR: uv reads none of pip's settings. Where its own variable NAME is not set, it
# gets pip's: VALUE, which is that of pip's variable, else what pip's files say.
take_over() {
  local value=${!2:-}
  if [ -n "$value" ]; then
    return
  fi
  value=${3:-$("$1/bin/python" -m pip config get "global.$4" 2>/dev/null || true)}
  if [ -n "$value" ]; then
    export "$2=$(echo $value | tr ' ' "$5")"  # unquoted: what lies between several of them is one space then
  fi
}

# is_ready VENV STAMP: next time there is nothing to do.
is_ready() {
  echo "$wanted" > "$1/$2"
  echo "== installed in $((SECONDS - started)) s"
}
