# Shared functions of the setup scripts, which source this file from the project's folder.
unset PYTHONDONTWRITEBYTECODE  # without compiled files every process would spend seconds compiling its libraries
python=${PYTHON:-python3}

# make_venv VENV STAMP WHAT FILE...: end the script if STAMP says that VENV is up to date with these files; otherwise
# create VENV if it is missing. WHAT is shown to a user whose Python is too old.
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

# install VENV CONSTRAINTS FLAG... PACKAGE...: install with uv, which takes seconds instead of pip's minutes, shares files
# between environments, and checks every file against the hashes in CONSTRAINTS, which pip does not do for an editable
# package.
install() {
  local venv=$1; shift
  grep '^uv==' constraints-build.txt |
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --require-hashes --requirement /dev/stdin
  take_over "$venv" UV_FIND_LINKS "${PIP_FIND_LINKS:-}" find-links ,
  take_over "$venv" UV_DEFAULT_INDEX "${PIP_INDEX_URL:-}" index-url ' '
  take_over "$venv" UV_INDEX "${PIP_EXTRA_INDEX_URL:-}" extra-index-url ' '
  take_over "$venv" UV_NO_INDEX "${PIP_NO_INDEX:-}" no-index ' '
  take_over "$venv" SSL_CERT_FILE "${PIP_CERT:-}" cert ' '
  export UV_INDEX_STRATEGY=${UV_INDEX_STRATEGY:-unsafe-best-match}  # as with pip, all indexes have the same priority
  install_checked "$venv/bin/uv" "$venv" "$@"
}

# install_checked UV VENV CONSTRAINTS FLAG... PACKAGE...: refuse packages that are not listed and files with another hash.
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
  if [ -n "$torch" ]; then  # a build for CPUs or for one version of CUDA: there are many, which are not in the index
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

# warn_of_cuda VENV PLAN: warn before gigabytes are downloaded that a machine without a GPU cannot use.
warn_of_cuda() {
  if [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null; then
    return
  fi
  if grep '^ + nvidia-' <<<"$2" >/dev/null; then
    echo "== this machine has no NVIDIA GPU, but for $("$1/bin/python" --version) only the CUDA build of torch was found (about 5 GB)." \
      "To avoid it: let pip find a CPU build (a version that ends in +cpu) by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS, or use another PYTHON" >&2
  fi
}

# take_over VENV NAME VALUE SETTING SEPARATOR: uv does not read pip's settings. If uv's variable NAME is not set, set it
# from pip: VALUE (the value of pip's variable), else the setting in pip's files.
take_over() {
  local value=${!2:-}
  if [ -n "$value" ]; then
    return
  fi
  value=${3:-$("$1/bin/python" -m pip config get "global.$4" 2>/dev/null || true)}
  if [ -n "$value" ]; then
    export "$2=$(echo $value | tr ' ' "$5")"  # unquoted, so that several values are separated by one space
  fi
}

# is_ready VENV STAMP: record that VENV is up to date.
is_ready() {
  echo "$wanted" > "$1/$2"
  echo "== installed in $((SECONDS - started)) s"
}

# install_debian SCRIPT WHAT PACKAGE...: install Debian packages that the tests need, or say how to.
install_debian() {
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "$1: there is no $2 for the tests; install one: sudo apt-get install ${*:3}" >&2
    exit 1
  fi
  echo "$1: installing ${*:3}"
  export DEBIAN_FRONTEND=noninteractive
  # On a newly created machine another apt-get may still be running: wait for it.
  apt-get -q -o DPkg::Lock::Timeout=300 update >/dev/null
  apt-get -q -y -o DPkg::Lock::Timeout=300 install --no-install-recommends "${@:3}" >/dev/null
}
