"""Imports triton in one place; it is optional, and nothing here touches a GPU.

Kernels are for bfloat16 tensor cores. Without a GPU they run in triton's interpreter
(TRITON_INTERPRET=1, set before this module is imported), which computes bfloat16 as if its bits were
integers and says nothing (triton-lang/triton#11584, closed as unsupported). So every kernel takes a
compile-time `UPCAST`, given `INTERPRET`, under which operands go to float32 before they are computed
with; nothing else may differ.
"""

from __future__ import annotations

import os
from functools import cache

import torch

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether kernels run in the interpreter, on tensors of the CPU; triton reads the same variable."""
LEAST_CAPABILITY = (8, 0)
"""Compute capability from which tensor cores take bfloat16."""
LEAST_TRITON = (3, 4)
"""The oldest triton that the kernels have been compiled by."""


@cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this device: triton is there, and the GPU computes in bfloat16.

    In the interpreter they run on the CPU too.
    """
    if device.type == "cpu" and not INTERPRET:
        return False
    try:
        import triton
    except ImportError:
        return False
    if tuple(int(part) for part in triton.__version__.split(".")[:2]) < LEAST_TRITON:
        return False
    return device.type == "cpu" or torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY
