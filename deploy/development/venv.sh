#!/usr/bin/env bash
# Makes .venv in the project's root. The dependencies (torch alone is 4.7 GB) are installed once into a
# cache folder keyed by what they are, and every checkout gets a hard-linked copy: seconds, no disk.
# Call tools as `python -m TOOL`: the scripts in bin/ name the cached interpreter.
# TORCH=2.8.0 makes .venv-2.8.0 with that release of torch, and the torchvision that belongs to it.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=".venv${TORCH:+-$TORCH}"
pins=$(mktemp -d)
trap 'rm -rf "$pins"' EXIT
cp deploy/development/constraints.txt "$pins"
if [ -n "${TORCH:-}" ]; then  # torch and torchvision name the versions of their companions themselves
  sed -i -E '/^(torch|triton|cuda-|nvidia-)/d' "$pins/constraints.txt"
  echo "torch==$TORCH" >> "$pins/constraints.txt"
fi
cache="${XDG_CACHE_HOME:-$HOME/.cache}/trainwright"
python="${PYTHON:-python3}"
read -r key layout < <("$python" - "$pins/constraints.txt" <<'PY'
import hashlib, json, sys, tomllib
from pathlib import Path
project = tomllib.load(open("pyproject.toml", "rb"))
for group in ("docs", "release"):  # docs.sh and release.sh install theirs by themselves
    project["dependency-groups"].pop(group)
project["project"]["optional-dependencies"].pop("mcp")  # as mcp_venv.sh does
wanted = [project["project"]["dependencies"], project["project"]["optional-dependencies"],
          project["dependency-groups"], project["build-system"], sys.version, "5",
          Path(sys.argv[1]).read_text()]
for part in (wanted, [project["tool"]["hatch"], project["project"]["version"]]):
    print(hashlib.sha256(json.dumps(part).encode()).hexdigest()[:12], end=" ")
print()
PY
)
cached="$cache/venv-$key"
mkdir -p "$cache"
exec 9>"$cache/venv.lock"
flock 9
if [ ! -e "$cached/.complete" ]; then
  echo "installing the Python dependencies into $cached (once; torch takes a minute or two)"
  rm -rf "$cached"
  # Environments of former dependencies (5 GB each) go once no checkout has a hard link to them.
  find "$cache" -mindepth 2 -maxdepth 2 -path "$cache/venv-*/.complete" -links 1 -printf '%h\0' | xargs -0 --no-run-if-empty rm -rf
  if ! "$python" -c 'import ensurepip' 2>/dev/null; then  # Debian keeps it in a package of its own
    apt-get update -qq && apt-get install --yes -qq --no-install-recommends python3-venv
  fi
  "$python" -m venv "$cached"
  "$python" - > "$pins/requirements.txt" <<'PY'
import tomllib
project = tomllib.load(open("pyproject.toml", "rb"))
for group in ("docs", "release"):
    project["dependency-groups"].pop(group)
project["project"]["optional-dependencies"].pop("mcp")
groups = [project["project"]["dependencies"], *project["project"]["optional-dependencies"].values(),
          *project["dependency-groups"].values(), project["build-system"]["requires"]]
print("\n".join(sorted({line for group in groups for line in group})))
print("editables")  # hatchling asks for it to install a checkout in place
PY
  "$cached/bin/python" -m pip install --no-cache-dir -r "$pins/requirements.txt" -c $pins/constraints.txt
  touch "$cached/.complete"
fi
if [ "$(cat "$venv/.key" 2>/dev/null || true)" != "$key" ]; then
  rm -rf "$venv"
  # Hard links do not reach over file systems; a copy does, and takes 5 GB.
  cp -al "$cached" "$venv" 2>/dev/null || { rm -rf "$venv"; cp -a "$cached" "$venv"; }
  echo "$key" > "$venv/.key"
fi
if [ "$(cat "$venv/.layout" 2>/dev/null || true)" != "$layout" ]; then
  "$venv/bin/python" -m pip install --quiet --no-deps --no-build-isolation --editable .
  echo "$layout" > "$venv/.layout"
fi
