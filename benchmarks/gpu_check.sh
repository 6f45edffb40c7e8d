#!/usr/bin/env bash
# Checks QLM on the GPU of this machine: versions, transfer and step times with PyTorch, the vllm engine's conformance suite on CUDA, sleep
# levels, the agent's bench, tensor parallelism. Logs, figures and summary.json go to out/gpu-check.
#
#   benchmarks/gpu_check.sh [--install] [--cpu] [--out DIR] [--model DIR] [--only CHECK]...
#
#   --install  first make the virtual environment .venv-gpu with qlm-serving[vllm] and what the tests need (10 GB)
#   --cpu      a dry run without a GPU, with small sizes
#
# PYTHON names the interpreter; by default that of .venv-gpu, .venv-vllm or .venv, whichever is there first, else python3.
# Exit codes: 0 nothing failed; 1 a check failed, or none could run; 2 wrong use; 3 no GPU that can be used.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv-gpu"
arguments=()
for argument in "$@"; do
  if [ "$argument" = "--install" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check \
      --constraint "$root/constraints-gpu.txt" --editable "${root}[gateway,planner,vllm,load]" pytest pytest-asyncio pytest-timeout hypothesis
    PYTHON="$venv/bin/python"
  else
    arguments+=("$argument")
  fi
done

python="${PYTHON:-}"
for folder in "$venv" "$root/.venv-vllm" "$root/.venv"; do
  if [ -z "$python" ] && [ -x "$folder/bin/python" ]; then
    python="$folder/bin/python"
  fi
done

export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
export PYTHONPATH="$root:$root/src:$root/load:$root/services/gateway:$root/services/planner:$root/services/estimator:$root/services/agent"
exec "${python:-python3}" -m benchmarks.gpu ${arguments[@]+"${arguments[@]}"}
