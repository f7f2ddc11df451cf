"""Determines the encodings of a ModelOpt model from its `quantization_config`, without its arrays.

Source: ModelOpt 0.47, `export/quant_utils.py` (process_layer_quant_config, get_quant_config).
"""

from __future__ import annotations

from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import Codebook, ModelTensor
from qconvert.errors import UnsupportedModel, shown
from qconvert.formats.layouts import config_checks as checks
from qconvert.formats.layouts.base import MatrixKind, Promise
from qconvert.formats.layouts.modelopt import config as names
from qconvert.formats.layouts.modelopt.arrays import BLOCK, ModelOpt

_ROWS = Codebook("e4m3", None, DType.F32, DType.BF16)
_NVFP4 = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="multiplied")
_ENCODINGS = {
    names.FP8: Codebook("e4m3", None, DType.F32, DType.BF16, group_rows=None),
    names.FP8_ROWS: _ROWS,
    names.FP8_BLOCKS: Codebook("e4m3", BLOCK, DType.F32, DType.BF16, group_rows=BLOCK),
    names.MXFP8: Codebook("e4m3", 32, DType.F8_E8M0, DType.BF16),
    names.NVFP4: _NVFP4,
    names.NVFP4_WEIGHTS: _NVFP4,
    names.MXFP4: Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16),
}


def promise(config: Json) -> Promise:
    """What `quant_algo` and `quantized_layers` say of linears and the head, but for those to `ignore`."""
    settings = checks.settings_of(config)
    kept = checks.left_plain(settings.get("ignore"))

    def encoding(tensor: ModelTensor, kind: MatrixKind) -> Codebook | None:
        named = names.algorithm(settings, checks.base_of(tensor))
        if kind not in ("linear", "head") or kept(tensor) or not named:
            return None
        if named not in _ENCODINGS:
            raise UnsupportedModel(
                f"config.json: quant_algo {shown(named)}: sizes are in the headers",
                "give the whole model folder, or its name on the Hub",
            )
        return _ENCODINGS[named]

    return Promise(ModelOpt(), encoding)
