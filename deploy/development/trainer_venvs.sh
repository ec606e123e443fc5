#!/usr/bin/env bash
# Makes an environment for each trainer that `trainwright export` writes for, with the versions that the exports name, in the
# cache folder; prints their interpreters. They share the newest release of torch with `make test-releases` and with each other,
# but not their dependencies, which conflict. A trainer that cannot be installed is left out, with the reason on standard error;
# then the exit status is 1, or 3 if no package index can be reached.
set -euo pipefail
cd "$(dirname "$0")/../.."

fail() {  # what cannot be installed
  if .venv/bin/python -m pip index versions pip > /dev/null 2>&1; then
    echo "$1 cannot be installed here: pip's message is above" >&2
    return 1
  fi
  echo "$1 cannot be installed here: no package index can be reached" >&2
  return 3
}

torch=$(.venv/bin/python -c "from trainwright_worker.torch_releases import NEWEST; print(NEWEST.version)")
TORCH=$torch deploy/development/venv.sh >&2 || fail "torch==$torch"
cache="${XDG_CACHE_HOME:-$HOME/.cache}/trainwright"
key=$(cat ".venv-$torch/.key")
base=$cache/venv-$key
export DS_BUILD_OPS=0  # DeepSpeed compiles its kernels when they are used
status=0
for package in "$@"; do
  folder=$cache/trainer-$package-$key
  if [ ! -e "$folder/.complete" ]; then
    rm -rf "$folder"
    "$base/bin/python" -m venv --without-pip "$folder"
    packages=$("$folder/bin/python" -c "import site; print(site.getsitepackages()[0])")
    "$base/bin/python" -c "import site; print(site.getsitepackages()[0])" > "$packages/torch.pth"
    if ! "$base/bin/python" -m pip --python "$folder/bin/python" install --quiet "setuptools<81" wheel >&2 ||
      ! "$base/bin/python" -m pip --python "$folder/bin/python" install --quiet --no-build-isolation "$package" "torch==$torch" >&2; then
      fail "$package" || status=$?
      continue
    fi
    touch "$folder/.complete"
  fi
  echo "$package $folder/bin/python"
done
exit "$status"
