"""triton, imported in one place; it is optional, and nothing here touches a GPU.

Kernels are for bfloat16 tensor cores. Without a GPU they run in triton's interpreter
(TRITON_INTERPRET=1, set before this module is imported), which computes bfloat16 as if its bits were
integers and says nothing (triton-lang/triton#11584, closed as unsupported). So every kernel takes a
compile-time `UPCAST`, given `INTERPRET`, under which operands go to float32 before they are computed
with; nothing else may differ.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in the interpreter, on tensors of the CPU; triton reads the same variable."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability from which tensor cores take bfloat16."""


@cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: triton is installed, and the GPU computes in bfloat16.

    In the interpreter they run on the CPU too.
    """
    if find_spec("triton") is None:
        return False
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
    return INTERPRET
