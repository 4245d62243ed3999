#!/bin/sh
# The default tests on several versions of torch, each in an environment of its own that is removed again.
#
#   tools/torch_matrix.sh [VERSION ...]      such as 2.10 2.15; without any: the oldest and the newest supported
#
# A version takes about 6 GB of disk, since the wheels bring CUDA.
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 2.10 2.15
environments=$(mktemp -d)
trap 'rm -rf "$environments"' EXIT
failed=
for version; do
    python3 -m venv "$environments/$version"
    "$environments/$version/bin/pip" install --quiet "torch==$version.*" --editable '.[test]'
    "$environments/$version/bin/python" -c "import torch; print('torch', torch.__version__)"
    "$environments/$version/bin/python" -m pytest -q -p no:cacheprovider || failed="$failed $version"
    rm -rf "${environments:?}/$version"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
