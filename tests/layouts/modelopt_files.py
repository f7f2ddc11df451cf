"""Makes the folders of tests/layouts/modelopt: a tiny model as NVIDIA's exporter writes it, and its numbers.

`python tests/layouts/modelopt_files.py`, with nvidia-modelopt 0.47 installed (and omegaconf, pulp), writes
them again. `dequantized.json` holds SHA-256 of the float32 numbers of every weight, by ModelOpt's own
`dequantize`; its NVFP4 has one zero, so no sign of a zero counts.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.support.models import tiny  # noqa: E402

FOLDER = ROOT / "tests" / "layouts" / "modelopt"
SIZES = {
    "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
# Blocks of 128 by 128 need more: a single one is exported as one number.
WIDE = SIZES | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128, "num_key_value_heads": 2}
KEPT = ("config.json", "hf_quant_config.json", "model.safetensors")


def configs() -> dict[str, Any]:
    """The quantization settings of every folder, by its name."""
    import modelopt.torch.quantization as mtq

    fp8_kv = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    fp8_kv["quant_cfg"].extend(mtq.FP8_KV_CFG["quant_cfg"])
    mixed = copy.deepcopy(mtq.NVFP4_DEFAULT_CFG)
    own = [e for e in mtq.FP8_DEFAULT_CFG["quant_cfg"] if e["quantizer_name"] in ("*weight_quantizer",)]
    for entry in copy.deepcopy(own):
        for kind in ("weight", "input"):
            mixed["quant_cfg"].append(entry | {"quantizer_name": f"*self_attn*{kind}_quantizer"})
    awq = copy.deepcopy(mtq.INT4_AWQ_CFG)
    awq["quant_cfg"][1]["cfg"]["block_sizes"][-1] = 32
    return {
        "fp8-kv": fp8_kv,
        "fp8-rows": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "fp8-blocks": mtq.FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG,
        "nvfp4": mtq.NVFP4_DEFAULT_CFG,
        "mixed": mixed,
        "mxfp8": mtq.MXFP8_DEFAULT_CFG,
        "int4-awq": awq,
    }


def source(folder: Path, name: str) -> Path:
    """The 16-bit model that a folder is made from."""
    return tiny(folder, "qwen3", **(WIDE if name == "fp8-blocks" else SIZES))


def dequantized(folder: Path) -> dict[str, str]:
    """SHA-256 of the numbers of every weight whose codes ModelOpt's own classes read back."""
    found = {}
    arrays = load_file(folder / "model.safetensors")
    for name, codes in arrays.items():
        scale = arrays.get(f"{name}_scale")
        if name.endswith(".weight") and scale is not None:
            numbers = _numbers(codes, scale, arrays.get(f"{name}_scale_2"))
            if numbers is not None:
                found[name] = hashlib.sha256((numbers.float() + 0).contiguous().numpy().tobytes()).hexdigest()
    return found


def _numbers(codes: torch.Tensor, scale: torch.Tensor, second: torch.Tensor | None) -> torch.Tensor | None:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    f32 = torch.float32
    if second is not None:
        shape = torch.Size([codes.shape[0], codes.shape[1] * 2])
        tensor = NVFP4QTensor(shape, f32, codes)
        return tensor.dequantize(f32, scale=scale, double_scale=second, block_sizes={-1: 16})
    if scale.dtype is torch.uint8:
        return MXFP8QTensor(codes.shape, f32, codes).dequantize(f32, scale=scale)
    if codes.dtype is not torch.float8_e4m3fn:
        return None  # int4: ModelOpt exports it, and reads another packing
    tensor = FP8QTensor(codes.shape, f32, codes)
    if scale.dim() == 4:
        return tensor.dequantize(f32, scale=scale[:, 0, :, 0], block_sizes={-1: 128, -2: 128})
    return tensor.dequantize(f32, scale=scale[:, None] if scale.dim() == 1 else scale)


def make(name: str, config: Any) -> None:
    """One folder, made anew."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as scratch:
        plain, out = source(Path(scratch) / "m", name), Path(scratch) / "q"
        model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
        tokens = torch.arange(128).reshape(4, 32) % 32
        export_hf_checkpoint(mtq.quantize(model, config, lambda each: each(tokens)), export_dir=out)
        shutil.rmtree(FOLDER / name, ignore_errors=True)
        (FOLDER / name).mkdir(parents=True)
        for file in KEPT:
            shutil.copyfile(out / file, FOLDER / name / file)
    said = json.dumps(dequantized(FOLDER / name), indent=1)
    (FOLDER / name / "dequantized.json").write_text(said + "\n")


if __name__ == "__main__":
    for each, settings in configs().items():
        if each in sys.argv[1:] or not sys.argv[1:]:
            make(each, settings)
