#!/bin/sh
# Tries the wheel of aarch64 in dist/, which `tools/build_wheel.sh aarch64` builds, on an x86-64: qemu runs its kernels.
#
#   tools/check_aarch64.sh
#
# tests/native pass, among them those that compare with the bits of an x86-64 (test_native_bits.py), and a tiny model is
# trained. Of speed nothing is learnt so. It takes five to ten minutes of two cores and 1 GB of disk, and needs Debian's
# mmdebstrap and qemu-user-static.
set -eu
cd "$(dirname "$0")/.."
repository=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
wheel=$(echo dist/*_aarch64.whl)

# The interpreter of that processor, and the C libraries that it and torch ask for.
mmdebstrap --quiet --arch=arm64 --variant=extract bookworm "$scratch/system" \
    --include=libbz2-1.0,libc6,libexpat1,libffi8,libgomp1,liblzma5,libsqlite3-0,libssl3,libstdc++6,libuuid1,python3.11,zlib1g

# pip would ask for what packages need on this processor. Of torch the newest without CUDA.
python3 -m venv "$scratch/build"
"$scratch/build/bin/pip" install --quiet --disable-pip-version-check uv
"$scratch/build/bin/uv" pip install --quiet --target "$scratch/site" --only-binary :all: \
    --python-platform aarch64-manylinux_2_28 --python-version 3.11 \
    "$wheel" 'torch==2.10.*' 'pytest>=8' 'pytest-timeout>=2.3' 'pytest-xdist>=3.7' 'google-crc32c>=1.5'

python_of_qemu() { PYTHONPATH="$scratch/site" qemu-aarch64-static -L "$scratch/system" "$scratch/system/usr/bin/python3.11" "$@"; }

# Away from the repository, whose megatier would be found first. Tests that start a process are left out: this system
# knows no way to run one.
mkdir "$scratch/run"
cp -R pyproject.toml tests bench tools examples "$scratch/run"
cd "$scratch/run"
python_of_qemu -m pytest -q -p no:cacheprovider tests/native \
    -k 'not interrupted_or_short and not reports_errno and not flipped_bit_fails and not reports_efbig and not forked_child'
python_of_qemu -m megatier train examples/quickstart.yaml --train.steps 2 --train.warmup_steps 1 --train.batch 1 \
    --train.evaluate_batches 1 --data.sequence_length 32 --model.compile false >"$scratch/log" 2>&1 ||
    { cat "$scratch/log" >&2; exit 1; }
echo "$(basename "$repository/$wheel") passes tests/native, and trains on three tiers, on an aarch64 of qemu."
