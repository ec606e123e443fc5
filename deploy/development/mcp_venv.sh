#!/usr/bin/env bash
# Makes .venv-mcp: what .venv has, and the SDK of the Model Context Protocol, which no other test needs; prints its interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
requirement=$(.venv/bin/python -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["mcp"])')
key="$requirement $(cat .venv/.key)"
if [ "$(cat .venv-mcp/.key 2>/dev/null || true)" != "$key" ]; then
  rm -rf .venv-mcp
  .venv/bin/python -m venv --without-pip .venv-mcp
  packages=$(.venv-mcp/bin/python -c "import site; print(site.getsitepackages()[0])")
  .venv/bin/python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > "$packages/base.pth"
  .venv/bin/python -m pip --python .venv-mcp/bin/python install --quiet "$requirement" -c deploy/development/constraints.txt >&2
  echo "$key" > .venv-mcp/.key
fi
echo .venv-mcp/bin/python
