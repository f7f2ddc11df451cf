"""What a Triton kernel becomes on a Hopper GPU, without one: compiled for sm_90 and disassembled."""

from __future__ import annotations

import re
import subprocess
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

_TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
}


@dataclass(frozen=True)
class MachineCode:
    """A compiled kernel: registers per thread, bytes of local and shared memory, instructions by name.

    `listing` has every instruction in its order, with its address.
    """

    name: str
    registers: int
    local: int
    shared: int
    instructions: Counter[str]
    listing: tuple[tuple[int, str], ...]

    @cached_property
    def loop(self) -> tuple[str, ...]:
        """The instructions of the shortest loop that uses the tensor cores: all from the target of its
        backward branch to that branch, whether predicated or of the uniform path, each counted once."""
        loops = []
        for address, text in self.listing:
            branch = re.search(r"\bBRA.*?0x([0-9a-f]+)", text)
            if branch and int(branch[1], 16) < address:
                body = tuple(t for at, t in self.listing if int(branch[1], 16) <= at <= address)
                loops += [body] if any("MMA" in t for t in body) else []
        return min(loops, key=len)

    def in_loop(self, pattern: str) -> int:
        """How many instructions of the loop match."""
        return sum(bool(re.search(pattern, text)) for text in self.loop)


class Launches:
    """Stands in for a kernel: `kernel[grid](...)` compiles it as that launch would, and keeps the code."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.codes: list[MachineCode] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **named: self.codes.append(machine_code(self.kernel, args, named))


def machine_code(kernel: Any, args: tuple[Any, ...], named: dict[str, Any]) -> MachineCode:
    """Compile for the arguments of a launch, which specialise it as triton's launcher has them do."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {key: named[key] for key in ("num_warps", "num_stages", "enable_fp_fusion") if key in named}
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        key: value for key, value in named.items() if key not in options
    }
    fixed = {p.name for p in kernel.params if p.is_constexpr}
    fixed |= {name for name, value in values.items() if isinstance(value, int) and value == 1}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = values[name]
        if name in fixed:
            signature[name], constants[(i,)] = "constexpr", value
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = _TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            if isinstance(value, torch.Tensor) or value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the default of enable_fp_fusion in later versions
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        usage = _output(tools / "cuobjdump", "-res-usage", cubin)
        sass = _output(tools / "cuobjdump", "-sass", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found is not None, usage
    registers, stack, local = map(int, found.groups())
    lines = re.findall(r"^\s+/\*([0-9a-f]{4,})\*/\s+([^;]+?)\s*;", sass, re.MULTILINE)
    listing = tuple((int(address, 16), text) for address, text in lines)
    names = Counter(re.sub(r"^@!?U?P\w+ ", "", text).split()[0].split(".")[0] for _, text in listing)
    return MachineCode(kernel.__name__, registers, stack + local, compiled.metadata.shared, names, listing)


def _output(*command: Any) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
