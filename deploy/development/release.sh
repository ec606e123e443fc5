#!/usr/bin/env bash
# Writes a version everywhere that names it, and its part of the changelog from the fragments in changes/.
# Afterwards: shorten the changelog to what a user wants to read, commit as `release: VERSION`, tag the commit.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${1:-}
[[ $version =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || { echo "VERSION: three numbers, got '$version'; for example 0.3.0" >&2; exit 2; }
former=$(sed -nE 's/^version = "(.*)"$/\1/p' pyproject.toml)
sed -i "s/^version = \"${former//./\\.}\"$/version = \"$version\"/" pyproject.toml
sed -i -E "s/^(version|appVersion): .*/\1: $version/" charts/trainwright/Chart.yaml
# Tags of our images, in what a person copies.
grep -rlE "(operator|worker):${former//./\\.}" README.md docs deploy/examples | xargs --no-run-if-empty \
  sed -i -E "s/(operator|worker):${former//./\\.}/\1:$version/g"
make --no-print-directory generate
tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
.venv/bin/python -m venv "$tools"
requirement=$(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]["release"])')
"$tools/bin/python" -m pip install --quiet "$requirement"
"$tools/bin/python" -m towncrier build --yes --version "$version"
