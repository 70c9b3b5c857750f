#!/usr/bin/env bash
# Puts a real vLLM 0.32.0, CUDA build, and the real torch 2.13.0, CUDA build, over a card that is not there.
# usage: setup.sh FOLDER [VLLM TORCH]     (some 6 GB and 5 minutes; builds only the stand-ins again when FOLDER has the rest)
# With another release, such as 0.33.0 and the torch 2.14.0 that it needs, only tests.card.shapes.measure is used.
# Real: every allocation that vLLM and torch ask for. Not real: time, and what kernels compute.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
vllm=${2:-0.32.0} torch=${3:-2.13.0}
stop() { echo "card-test: $1" >&2; exit 1; }
for tool in python3.11 gcc nm readelf; do
  command -v "$tool" >/dev/null || stop "$tool is missing (Debian: apt install python3.11-venv gcc libc6-dev binutils)"
done
folder=$(mkdir -p "$1" 2>/dev/null && cd "$1" && pwd) || stop "cannot make the folder $1"
pip() { "$folder/venv/bin/pip" --disable-pip-version-check -q "$@" 2>"$folder/pip.log"; }
explain() { stop "$1: $(grep -i error "$folder/pip.log" | tail -n 1)"; }
if [[ ! -e $folder/complete ]]; then
  free=$(df --output=avail -B1G "$folder" | tail -n 1)
  ((free >= 12)) || stop "$folder has ${free// /} GB free, and the set-up needs 12"
  python3.11 -m venv "$folder/venv" || stop "python3.11 cannot make a virtual environment (Debian: apt install python3.11-venv)"
  pip install "vllm==$vllm" || explain "pip cannot install vllm $vllm"
  # Three signs: not the CPU build, which pip would prefer where an index has both.
  pip download --no-deps -d "$folder" "torch===$torch" || explain "the package index has no CUDA build of torch $torch"
  pip install --no-deps --force-reinstall "$folder/torch-$torch"-*.whl || explain "pip cannot install torch $torch"
  rm "$folder/torch-$torch"-*.whl
fi
found=$("$folder/venv/bin/python" -c 'from importlib.metadata import version; print(version("vllm"), version("torch"))')
[[ $found == "$vllm $torch" ]] || stop "$folder has vllm and torch $found, and the tests are written for $vllm $torch"
compgen -G "$folder/venv/lib/python3*/site-packages/torch/lib/libtorch_cuda.so" >/dev/null || stop "$folder has a torch without CUDA"
"$folder/venv/bin/python" "$here/native/build.py" "$folder"
[[ -e $folder/tiny ]] || "$folder/venv/bin/python" "$here/../engine/tiny_model.py" "$folder/tiny"
touch "$folder/complete"
