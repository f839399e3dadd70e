# Functions of .ci/run and .ci/release that find the oldest and newest versions.

# Succeeds if $1 runs, is Python $2.$3 or newer, and can create an environment with pip.
is_python() {
  "$1" -c "import ensurepip, sys, venv; sys.exit(sys.version_info < ($2, $3))" >/dev/null 2>&1
}

# The first Python 3.12 or newer: on PATH, then among pyenv's. Shims that only print a hint fail.
newer_python() {
  local candidate
  for candidate in python3.{12..19} "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.{12..19}*/bin/python3; do
    if is_python "$candidate" 3 12; then
      echo "$candidate"
      return
    fi
  done
  is_python python3 3 12 && echo python3
}

oldest_jax() {
  sed -n 's/^dependencies = .*"jax>=\([0-9.]*\)".*/\1/p' pyproject.toml
}
