#!/usr/bin/env bash
# Measures the decoder on one NVIDIA GPU in at most nine minutes, and writes the results to $OUT (by
# default, beside this script): gpu-DEVICE.json with every figure, gpu-DEVICE.md with the tables.
#
#   evals/results/run_gpu.sh                       all sections
#   evals/results/run_gpu.sh --section decode ...  some of them; correctness comes along
#   evals/results/run_gpu.sh --dry-run             the motions, on a CPU, at tiny sizes
#   PEERS=1 evals/results/run_gpu.sh               installs transformers and bitsandbytes first
#
# Needs python with torch, triton and the packages of pyproject.toml; PYTHON names another one.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
out=${OUT:-$root/evals/results}
python=${PYTHON:-python3}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 TOKENIZERS_PARALLELISM=false

if [ -n "${PEERS:-}" ]; then
  "$python" -m pip install --quiet 'transformers>=4.53' 'bitsandbytes>=0.45' 'accelerate>=1.1'
fi
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm --format=csv,noheader || true
else
  echo "no nvidia-smi here"
fi
"$python" - <<'FACTS'
import platform, sys
from importlib.metadata import PackageNotFoundError, version

def found(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"

names = ("torch", "triton", "transformers", "bitsandbytes")
print("python", platform.python_version(), *(f"{name} {found(name)}" for name in names))
FACTS
exec "$python" "$root/evals/speed.py" gpu --out "$out" "$@"
