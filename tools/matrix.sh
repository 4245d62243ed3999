#!/bin/sh
# The tests of all model families on several versions of transformers, which are installed beside the environment.
#
#   tools/matrix.sh [VERSION ...]      such as 5.6 5.17; without any: the oldest supported, 5.17, the newest
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- 5.6 5.17 newest
libraries=$(mktemp -d)
trap 'rm -rf "$libraries"' EXIT
failed=
for version; do
    wanted="transformers<6"
    [ "$version" = newest ] || wanted="transformers==$version.*"
    python -m pip install --quiet --target "$libraries/$version" "$wanted"
    export PYTHONPATH="$libraries/$version:$PWD"
    python -c "import transformers; print('transformers', transformers.__version__)"
    python -m pytest -q -p no:cacheprovider tests/test_families.py tests/test_vision.py || failed="$failed $version"
done
[ -z "$failed" ] || { echo "failed:$failed" >&2; exit 1; }
