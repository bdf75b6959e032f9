#!/bin/sh
# Makes a virtual environment with the peers that Esker is compared with: setup.sh DIRECTORY
# PyG's sampler library, torch-sparse, is built from source; that takes some ten minutes. A second run finds it done.
set -eu
directory=$1
if [ -e "$directory/ready" ]; then
    exit 0
fi
python3.11 -m venv "$directory"
pip="$directory/bin/pip"
"$pip" install --quiet torch==2.2.1 'numpy<2' torch-geometric==2.8.0 dgl==2.1.0 torchdata==0.7.1 \
    pyyaml pydantic pandas setuptools wheel
for package in torch-scatter torch-sparse; do
    FORCE_ONLY_CPU=1 "$pip" install --quiet --no-build-isolation "$package"
done
touch "$directory/ready"
