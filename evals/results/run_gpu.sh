#!/usr/bin/env bash
# Measures the decoder on one NVIDIA GPU in at most nine minutes: figures to gpu-DEVICE.jsonl as they come,
# tables to gpu-DEVICE.md, in $OUT or beside this script.
#
#   evals/results/run_gpu.sh                     all sections
#   evals/results/run_gpu.sh --section decode    one of them: its earlier figures are replaced
#   evals/results/run_gpu.sh --dry-run           the motions, on a CPU, at tiny sizes
#   PEERS=1 evals/results/run_gpu.sh             installs transformers and bitsandbytes first
#
# Needs python with torch, triton and the packages of pyproject.toml; PYTHON names another one.
# Correctness on the device, first: python -m pytest -m gpu
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
python=${PYTHON:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

if [ -n "${PEERS:-}" ]; then
  "$python" -m pip install --quiet 'transformers>=4.53' 'bitsandbytes>=0.45' 'accelerate>=1.1'
fi
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader || true
exec "$python" "$root/evals/speed.py" gpu --out "${OUT:-$root/evals/results}" "$@"
