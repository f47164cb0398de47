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
# common; by pip where uv cannot do it. Both take these flags; UV_COMPILE_BYTECODE=1 compiles what was installed.
install() {
  local venv=$1; shift
  if "$venv/bin/python" -m pip install --disable-pip-version-check --quiet uv; then
    speak_as_pip_does "$venv"
    if VIRTUAL_ENV=$PWD/$venv "$venv/bin/uv" pip install --system-certs --quiet "$@"; then
      return
    fi
    echo "== uv could not install it; pip is asked (this takes longer)" >&2
  fi
  "$venv/bin/python" -m pip install --disable-pip-version-check --quiet "$@"
}

# uv reads none of pip's settings: where packages come from has to be said again. As with pip, no index comes before another.
speak_as_pip_does() {
  local venv=$1
  UV_FIND_LINKS=${PIP_FIND_LINKS:-$(pip_setting "$venv" find-links)}
  UV_DEFAULT_INDEX=${PIP_INDEX_URL:-$(pip_setting "$venv" index-url)}
  UV_INDEX=${PIP_EXTRA_INDEX_URL:-$(pip_setting "$venv" extra-index-url)}
  export UV_INDEX_STRATEGY=unsafe-best-match
  local name
  for name in UV_FIND_LINKS UV_DEFAULT_INDEX UV_INDEX; do
    if [ -n "${!name}" ]; then export "${name?}"; else unset "$name"; fi
  done
}

pip_setting() {
  "$1/bin/python" -m pip config get "global.$2" 2>/dev/null | tr '\n' ' ' | sed 's/ *$//' || true
}

# is_ready VENV STAMP: next time there is nothing to do.
is_ready() {
  echo "$wanted" > "$1/$2"
  echo "== installed in $((SECONDS - started)) s"
}
