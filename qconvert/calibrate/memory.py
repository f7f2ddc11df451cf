"""Estimates what calibrated quantization takes, before anything is read."""

from __future__ import annotations

from dataclasses import dataclass

from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.input_sums import MOST_HELD
from qconvert.calibrate.waves import BATCH_TOKENS
from qconvert.runtime.config import DecoderConfig

_FLOAT = 4
# Of an input of I columns, in I^2 float32 numbers: sums of x~ x~^T and of (x - x~) x~^T, the factor, and the
# float64 copy that it or the target shift is computed in, with the shift itself (`quant.hessian`).
_SQUARES = 6
# Activations of a batch that are alive together: gate, up, their product, what they are copied from.
_ALIVE = 4


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of memory beside the process itself, and of disk for activations."""

    memory: int
    disk: int


def needs(config: DecoderConfig, calibration: Calibration) -> Needs:
    """What the statistics of the widest input, a layer and a batch of activations take together."""
    linears = [(key, shape) for key, shape in config.shapes.items() if key[1] is not None and len(shape) == 2]
    widest = max(shape[1] for _, shape in linears)
    tallest = max(shape[0] for _, shape in linears)
    layers = range(config.layers)
    # The original weights as stored, and the quantized ones in float32.
    layer = max(sum(rows * width for key, (rows, width) in linears if key[1] == i) for i in layers)
    batch = max(BATCH_TOKENS, calibration.tokens_BT.shape[1])
    memory = (
        _SQUARES * widest**2 * _FLOAT
        + 2 * MOST_HELD * widest * _FLOAT
        + layer * (2 + _FLOAT)
        + batch * max(tallest, widest) * _ALIVE * _FLOAT
    )
    streams = 2 if calibration.shift else 1
    disk = streams * calibration.tokens_BT.size * config.hidden * _FLOAT
    if calibration.method == "two-sided":
        # The backward pass keeps what every layer reads, then E[g g^T] in blocks of rows.
        read = calibration.gradient_windows_WT.size * config.hidden * (config.layers + 1)
        blocks = sum(rows * min(rows, calibration.output_rows) for _, (rows, _) in linears)
        disk = max(disk + blocks * _FLOAT, (read + blocks) * _FLOAT)
    return Needs(memory, disk)
