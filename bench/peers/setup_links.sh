#!/bin/sh
# Makes a virtual environment with the peers for link prediction: setup_links.sh DIRECTORY
# PyTorch, and PyKEEN if it installs. A second run finds it done.
set -eu
directory=$1
if [ -e "$directory/ready" ]; then
    exit 0
fi
python3.11 -m venv "$directory"
pip="$directory/bin/pip"
"$pip" install --quiet torch==2.2.1 'numpy<2'
"$pip" install --quiet torch==2.2.1 'numpy<2' pykeen || echo "PyKEEN does not install here" >&2
touch "$directory/ready"
