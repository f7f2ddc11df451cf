"""Rounds the inputs of a linear as loaders do that multiply them quantized: one function for every device.

Sources of the scales: compressed-tensors 0.20 (`quantization/utils/helpers.py`: calculate_qparams,
compute_dynamic_scales_and_zp; `mxfp_utils.py`: generate_mx_scales); bitsandbytes 0.50
(`int8_vectorwise_quant`, arXiv 2208.07339); FBGEMM (`quantize_fp8_per_row`: its `scale_ub`). vLLM divides
the largest int8 magnitude by 127 where compressed-tensors divides by 127.5, and is otherwise the same.
Legend: I in features, S columns of a group.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.core.activations import ActivationScheme, InputQuantization
from qconvert.core.dtypes import DType

_LARGEST_FLOAT = {8: 448.0, 4: 6.0}
"""Of E4M3 and of E2M1."""
_LARGEST_EXPONENT = {8: 8, 4: 2}
"""Those of these numbers."""


def round_inputs(x: Tensor, inputs: InputQuantization) -> Tensor:
    """What quantized inputs are worth: [..., I], computed in float32 and given in the dtype of x.

    Scales of a whole tensor are those of all rows that are multiplied together.
    """
    scheme, x_f32 = inputs.scheme, x.float()
    if scheme.outliers is not None:
        return _round_but_outliers(x_f32, scheme.outliers).to(x.dtype)
    if scheme.group_size is None:
        return _rounded(x_f32, inputs).to(x.dtype)
    width = x.shape[-1]
    padded = F.pad(x_f32, (0, -width % scheme.group_size))
    groups = _rounded(padded.view(*x.shape[:-1], -1, scheme.group_size), inputs)
    return groups.flatten(-2)[..., :width].to(x.dtype)


def _rounded(x: Tensor, inputs: InputQuantization) -> Tensor:
    """Numbers [..., S] whose last dimension shares a scale, unless all of them do: in float32."""
    scheme = inputs.scheme
    low, high = _range(scheme)
    scale, zero = torch.tensor(inputs.scale, device=x.device), torch.tensor(inputs.zero, device=x.device)
    if scheme.dynamic:
        whole = scheme.shared_by == "tensor"
        least, most = torch.aminmax(x) if whole else torch.aminmax(x, dim=-1, keepdim=True)
        # 0 is always a number of the grid.
        scale, zero = _scales(least.clamp(max=0), most.clamp(min=0), inputs)
    codes = (x / scale).add_(zero).clamp_(low, high)
    return _nearest(codes, scheme).sub_(zero).mul_(scale)


def _range(scheme: ActivationScheme) -> tuple[float, float]:
    """The least and the largest code."""
    if scheme.floats:
        return -_LARGEST_FLOAT[scheme.bits], _LARGEST_FLOAT[scheme.bits]
    half = float(1 << (scheme.bits - 1))
    return -half, half - 1


def _scales(least: Tensor, most: Tensor, inputs: InputQuantization) -> tuple[Tensor, Tensor]:
    """Scales and zero points of numbers between these, which have 0 between them."""
    scheme = inputs.scheme
    low, high = _range(scheme)
    none = torch.zeros((), device=most.device)
    if not scheme.symmetric:
        scale = _positive((most - least) / (high - low), torch.finfo(torch.float32).eps)
        return scale, (low - least / scale).clamp_(low, high).round_()
    largest = torch.maximum(-least, most)
    if scheme.most is not None:
        largest = largest.clamp(max=scheme.most)
    if scheme.scale_dtype is DType.F8_E8M0:
        return _power_of_two(largest, _LARGEST_EXPONENT[scheme.bits]), none
    scale = largest / ((high - low) / 2)
    if scheme.scale_dtype is DType.F8_E4M3:
        stored = (scale * inputs.scale).clamp_(max=448).to(torch.float8_e4m3fn).float()
        return _positive(stored, torch.finfo(torch.float8_e4m3fn).eps) / inputs.scale, none
    return _positive(scale, torch.finfo(torch.float32).eps), none


def _positive(scale: Tensor, least: float) -> Tensor:
    """Scales, those of nothing but zeros replaced."""
    return torch.where(scale == 0, least, scale)


def _power_of_two(largest: Tensor, exponent: int) -> Tensor:
    """MX scales: the power of two by which the largest number has the largest code's `exponent`.

    From 7/8 of the next power of two on, that one is taken.
    """
    fraction, power = torch.frexp(largest)
    power = power - 1 + (fraction >= 0.875).int() - exponent
    return torch.ldexp(torch.ones_like(largest), power.clamp_(-126, 127))


def _nearest(codes: Tensor, scheme: ActivationScheme) -> Tensor:
    """The nearest codes, halves to even ones."""
    if not scheme.floats:
        return codes.round_()
    if scheme.bits == 8:
        return codes.to(torch.float8_e4m3fn).float()
    magnitudes = codes.abs()
    steps = torch.where(magnitudes < 2, 0.5, torch.where(magnitudes < 4, 1.0, 2.0))
    return codes.div_(steps).round_().mul_(steps)


def _round_but_outliers(x: Tensor, threshold: float) -> Tensor:
    """Int8 per row, but for columns that hold a number beyond the threshold: these stay as they are."""
    x = x.half().float()
    beyond = x.abs() >= threshold
    kept_I = beyond.flatten(0, -2).any(0)
    rest = x.masked_fill(beyond, 0)
    unit = _positive(rest.abs().amax(-1, keepdim=True), 1.0) / 127
    return torch.where(kept_I, x, (rest / unit).round_().mul_(unit))
