#!/usr/bin/env bash
# From a fresh checkout to a measured winner on this machine: an environment with the worker alone, then `trainwright tune`.
# It needs Python 3.11 or later; torch is the wheel without CUDA where there is no NVIDIA GPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
plan="${1:-deploy/examples/tiny.yaml}"
if [ -x .venv/bin/python ]; then
  python=.venv/bin/python
else
  python=.venv-try/bin/python
  if [ ! -e .venv-try/.complete ]; then
    "${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
    "${PYTHON:-python3}" -m venv .venv-try
    torch=$("$python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["worker"])')
    wheels=()
    command -v nvidia-smi > /dev/null || wheels=(--index-url https://download.pytorch.org/whl/cpu)
    "$python" -m pip install --quiet "$torch" "${wheels[@]}" || "$python" -m pip install --quiet "$torch"
    "$python" -m pip install --quiet '.[worker]'
    touch .venv-try/.complete
  fi
fi
exec "$python" -m trainwright tune "$plan"
