#!/usr/bin/env bash
# Builds the documentation into build/site; a broken link or anchor ends it with an error. Zensical has an environment of
# its own, once per version in the cache folder: nothing of the project is imported.
set -euo pipefail
cd "$(dirname "$0")/../.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/trainwright"
python="${PYTHON:-python3}"
requirement=$("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["docs"])')
key=$( { echo "$requirement"; "$python" -VV; cat deploy/development/constraints.txt; } | sha256sum | cut -c -12)
tools="$cache/docs-$key"
mkdir -p "$cache"
exec 9>"$cache/docs.lock"
flock 9
if [ ! -e "$tools/.complete" ]; then
  rm -rf "$tools"
  "$python" -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet --no-cache-dir "$requirement" -c deploy/development/constraints.txt
  touch "$tools/.complete"
fi
flock --unlock 9
"$tools/bin/python" -m zensical build --clean --strict
