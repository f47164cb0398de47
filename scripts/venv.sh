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

# install VENV CONSTRAINTS FLAG... PACKAGE...: by uv, which takes seconds where pip takes minutes, shares what environments
# have in common, and checks every file against the hashes in CONSTRAINTS, which pip does not do for an editable package.
# UV_COMPILE_BYTECODE=1 compiles what was installed.
install() {
  local venv=$1; shift
  grep '^uv==' constraints-build.txt |
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --require-hashes --requirement /dev/stdin
  take_over "$venv" UV_FIND_LINKS "${PIP_FIND_LINKS:-}" find-links ,
  take_over "$venv" UV_DEFAULT_INDEX "${PIP_INDEX_URL:-}" index-url ' '
  take_over "$venv" UV_INDEX "${PIP_EXTRA_INDEX_URL:-}" extra-index-url ' '
  take_over "$venv" UV_NO_INDEX "${PIP_NO_INDEX:-}" no-index ' '
  take_over "$venv" SSL_CERT_FILE "${PIP_CERT:-}" cert ' '
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}  # as with pip, no index comes before another
  install_checked "$venv/bin/uv" "$venv" "$@"
}

# install_checked UV VENV CONSTRAINTS FLAG... PACKAGE...: refuses a package that is not listed and a file with another hash.
install_checked() {
  local venv=$2 constraints=$3 plan unlisted torch
  local uv=("$1" pip install --python "$2/bin/python" --system-certs --build-constraint constraints-build.txt --require-build-hashes)
  shift 3
  if ! plan=$("${uv[@]}" --dry-run --no-verify-hashes --constraint "$constraints" "$@" 2>&1); then
    echo "$plan" >&2
    explain_hashes
    return 1
  fi
  warn_of_cuda "$venv" "$plan"
  unlisted=$(sed -n '/ (from file:/d; s/^ [+~] \([^=]*\)==.*/\1/p' <<<"$plan" | while read -r name; do
    grep -q "^$name==.* --hash=" "$constraints" || echo "$name"
  done)
  if [ -n "$unlisted" ]; then
    echo "== nothing was installed: $constraints has no version and hash of" $unlisted >&2
    echo "== to install them, add NAME==VERSION there for each and run scripts/hashes.py" >&2
    return 1
  fi
  torch=$(sed -n 's/^ [+~] \(torch==[^ ]*+[^ ]*\).*/\1/p' <<<"$plan")
  if [ -n "$torch" ]; then  # a build for CPUs or for one version of CUDA: there are many, and they are not in the index
    echo "== $torch is a build that this machine's settings of pip lead to; its hash is not known and not checked" >&2
    sed '/^torch==/s/ --hash.*//' "$constraints" > "$venv/constraints.txt"
    constraints=$venv/constraints.txt
  fi
  if ! "${uv[@]}" --quiet --constraint "$constraints" "$@"; then
    explain_hashes
    return 1
  fi
}

explain_hashes() {
  echo "== nothing was installed. Where a hash does not match, the file is not the one that these versions were tested with:" \
    "look where it comes from (the settings of pip name the places) before you trust it" >&2
}

# warn_of_cuda VENV PLAN: one line before gigabytes are downloaded that a machine without a GPU cannot use.
warn_of_cuda() {
  if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
    return
  fi
  if grep '^ + nvidia-' <<<"$2" >/dev/null; then
    echo "== this machine has no NVIDIA GPU, but for $("$1/bin/python" --version) only the CUDA build of torch was found (about 5 GB)." \
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
