"""Repacks existing codes as GGML blocks: integers as Q4_0, Q4_1 and Q8_0, E2M1 as MXFP4 and NVFP4.

A group is one or more blocks, each with the group's scale. Only the type of scales and mins changes, to half
precision; the change of a weight is measured in steps of the scale.
"""

from __future__ import annotations

import numpy as np

from qconvert.core.values import AffineIntRows, AffineMinRows, CodebookRows
from qconvert.quant.codebook import wide, with_tensor_number
from qconvert.quant.dequantize import mins_of, zeros_of
from qconvert.quant.packed_codes import codes_of
from qconvert.quant.transcode import most_steps

BLOCK = 32


def block_codes(value: AffineIntRows | AffineMinRows, type_name: str) -> tuple[np.ndarray, float, int]:
    """Returns rows as blocks of a type (uint8 [rows, bytes per row]), the largest change of a weight in
    steps, and how many scales or mins overflow half precision.

    Q4_0 and Q8_0 take codes that fit their signed range after subtracting zero points, Q4_1 codes of up to 4
    bits.
    """
    if type_name == "Q4_1":
        return _with_mins(value)
    assert isinstance(value, AffineIntRows) and value.groups_I is None
    group = value.encoding.group_size or value.width
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    half_RG, overflow = _half(scales_RG)
    signed_RI = codes_of(value).astype(np.int16) - np.repeat(zeros_of(value).astype(np.int16), group, axis=1)
    reach_RG = np.abs(signed_RI).reshape(*scales_RG.shape, -1).max(axis=2)
    steps = most_steps((half_RG - scales_RG) * reach_RG, scales_RG)
    if type_name == "Q8_0":
        codes_RI = signed_RI.astype(np.int8).view(np.uint8)
    else:
        codes_RI = _nibbles((signed_RI + 8).astype(np.uint8))
    return _blocks([half_RG], codes_RI, group), steps, overflow


def mxfp4_blocks(value: CodebookRows) -> np.ndarray:
    """Returns E2M1 codes with an E8M0 scale per 32 columns as MXFP4 blocks, uint8 [rows, bytes per row].

    Exact: GGML has the same codes and exponents (it doubles the table and halves the scale).
    """
    rows, groups = value.scales_RG.shape
    exponents = np.ascontiguousarray(value.scales_RG).view(np.uint8).reshape(rows, groups, 1)
    packed = _nibbles(value.codes_RI)
    return np.concatenate([exponents, packed], axis=2).reshape(rows, -1)


def nvfp4_blocks(value: CodebookRows) -> tuple[np.ndarray, float]:
    """Returns E2M1 codes with an E4M3 scale per 16 columns as NVFP4 blocks, uint8 [rows, bytes per row], and
    the largest change of a weight in steps.

    GGML has the same codes and scales; the tensor's divisor becomes a factor in another tensor (`factor_of`).
    """
    rows, groups = value.scales_RG.shape
    scales = value.scales_RG.reshape(rows, groups // 4, 4)
    halves = value.codes_RI.reshape(rows, groups, 2, 8)
    packed = (halves[:, :, 0] | halves[:, :, 1] << 4).reshape(rows, groups // 4, 32)
    blocks = np.concatenate([scales, packed], axis=2).reshape(rows, -1)
    if value.factor is not None:
        return blocks, moved_scales(value)
    return blocks, 0.0 if value.divisor is None else moved_by(factor_of(value) * value.divisor)


def moved_scales(before: CodebookRows, after: CodebookRows | None = None) -> float:
    """Returns the largest change in steps of an NVFP4 weight, by the scales that readers multiply codes with.

    They round the quotient, or product, of a scale and the number of its tensor to float32; where `after` is
    None, llama.cpp's, which multiply with that number last, and where the number itself is none of float32,
    they do not.
    """
    old_RG = _multiplied(before)
    new_RG = _multiplied(after) if after is not None else _exact(before)
    ratios_RG = np.divide(new_RG, old_RG, out=np.ones_like(old_RG), where=old_RG != 0)
    return moved_by(1 + float(np.abs(ratios_RG - 1).max(initial=0)))


def _exact(value: CodebookRows) -> np.ndarray:
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype).astype(np.float64)
    return scales_RG * (1 / (value.divisor or 1) if value.factor is None else value.factor)


def _multiplied(value: CodebookRows) -> np.ndarray:
    if value.divisor is not None and float(np.float32(value.divisor)) != value.divisor:
        return _exact(value)
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype)
    return with_tensor_number(scales_RG, value.divisor, value.factor).astype(np.float64)


def factor_of(value: CodebookRows) -> float:
    """Returns the factor that multiplies an NVFP4 tensor in llama.cpp: its own, or one over the divisor."""
    if value.factor is not None:
        return value.factor
    return float(np.float32(1 / (value.divisor or 1)))


def moved_by(times: float) -> float:
    """Returns the largest change in steps of an NVFP4 weight whose scales are multiplied by `times`."""
    moved = abs(times - 1)
    return 6 * moved if moved > 1e-12 else 0.0  # 6 is the largest E2M1 number; float64 rounds


def factors_of(value: CodebookRows) -> np.ndarray:
    """Returns the factor of every row, float32 [rows, 1]."""
    return np.full((value.rows, 1), factor_of(value), "<f4")


def _with_mins(value: AffineIntRows | AffineMinRows) -> tuple[np.ndarray, float, int]:
    group = value.encoding.group_size or value.width
    scales_RG = wide(value.scales_RG, value.encoding.scale_dtype).astype(np.float64)
    if isinstance(value, AffineMinRows):
        mins_RG = mins_of(value).astype(np.float64)
    else:
        mins_RG = -zeros_of(value).astype(np.float64) * scales_RG
    half_RG, overflow = _half(scales_RG)
    min_RG, overflow_of_mins = _half(mins_RG)
    largest_RG = codes_of(value).reshape(*scales_RG.shape, -1).max(axis=2)
    moved_RG = np.abs(half_RG - scales_RG) * largest_RG + np.abs(min_RG - mins_RG)
    blocks = _blocks([half_RG, min_RG], _nibbles(codes_of(value)), group)
    return blocks, most_steps(moved_RG, scales_RG), overflow + overflow_of_mins


def _half(numbers: np.ndarray) -> tuple[np.ndarray, int]:
    with np.errstate(over="ignore"):
        half = numbers.astype("<f2")
    return half, int(np.isinf(half).sum() - np.isinf(numbers).sum())


def _nibbles(codes_RI: np.ndarray) -> np.ndarray:
    """Packs two codes per byte: the first half of a block low, the second high."""
    halves = codes_RI.reshape(len(codes_RI), -1, 2, BLOCK // 2)
    return np.asarray(halves[:, :, 0] | halves[:, :, 1] << 4)


def _blocks(fields_RG: list[np.ndarray], codes: np.ndarray, group: int) -> np.ndarray:
    rows, groups = fields_RG[0].shape
    count, times = groups * group // BLOCK, group // BLOCK
    heads = [np.repeat(f, times, axis=1).reshape(rows, count, 1).view(np.uint8) for f in fields_RG]
    return np.concatenate([*heads, codes.reshape(rows, count, -1)], axis=2).reshape(rows, -1)
