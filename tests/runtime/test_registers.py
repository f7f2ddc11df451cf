"""Which registers kernels compute in, by the machine code for processors that need not be this one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from qconvert.quant.simd import processor

pytestmark = pytest.mark.skipif(processor.is_arm(), reason="of x86")
AVX2 = "+avx,+avx2,+bmi,+bmi2,+f16c,+fma,+lzcnt,+popcnt,+sse4.2"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512vnni,+avx512bf16"
TILE = "from qconvert.runtime.cpu.byte_tiles import byte_tile; made = byte_tile(32, True, 0)"
DOT = "from qconvert.runtime.cpu.kernels import compiled; made = compiled('int4_by_parts')"


def machine_code(kernel: str, name: str, features: str, cache: Path) -> str:
    """What is compiled for a processor, in a process that does not run it."""
    variables = {"NUMBA_CPU_NAME": name, "NUMBA_CPU_FEATURES": features, "NUMBA_CACHE_DIR": str(cache)}
    ran = subprocess.run(
        [sys.executable, "-c", f"{kernel}; print(made._library.get_asm_str())"],
        env={k: v for k, v in os.environ.items() if k != processor.VARIABLE} | variables,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return ran.stdout


def test_avx_vnni_is_used_without_avx512(tmp_path: Path) -> None:
    """Intel's client processors since Alder Lake have VNNI, for registers of 256 bits."""
    code = machine_code(TILE, "alderlake", f"{AVX2},+avxvnni", tmp_path)
    assert "vpdpbusd" in code and "ymm" in code
    assert "zmm" not in code and "vpmaddubsw" not in code


@pytest.mark.parametrize(("name", "wide"), [("znver4", False), ("znver5", True)])
def test_rows_are_multiplied_in_registers_that_a_processor_takes_whole(
    name: str, wide: bool, tmp_path: Path
) -> None:
    """All that is done for each row: products, and their scales."""
    code = re.split(r"^(\w+):", machine_code(DOT, name, AVX512, tmp_path), flags=re.MULTILINE)
    routines = dict(zip(code[1::2], code[2::2], strict=True))
    for part in ("int4_by_parts_of_some", "group_scales6spread", "group_scales7_repeat"):
        (routine,) = (text for label, text in routines.items() if part in label)
        assert ("%zmm" in routine) is wide, part
        assert part != "int4_by_parts_of_some" or re.search("vpdpwssd|vpmaddwd", routine)
