#!/usr/bin/env bash
# Unpacks pydantic and what it needs into .wheels, for a machine that has torch, numpy and PyYAML but no package index.
# Arguments: the version of that machine's Python (3.12) and its processor (x86_64).
set -euo pipefail
cd "$(dirname "$0")/../.."
rm -rf .wheels
"${PYTHON:-python3}" -m pip install --quiet --target .wheels --only-binary=:all: --implementation cp \
  --python-version "${1:-3.12}" --platform "manylinux2014_${2:-x86_64}" --platform "manylinux_2_17_${2:-x86_64}" \
  -c deploy/development/constraints.txt pydantic
