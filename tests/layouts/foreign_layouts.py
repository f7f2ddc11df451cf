"""Small models in layouts that qconvert reads, written by the tools that these layouts are of.

`python -m tests.layouts.foreign_layouts [NAME...]` writes them into tests/layouts/by_others; each needs its
tool: auto-round 0.16, hqq 0.2, torchao 0.18, amd-quark 0.13 or transformers 5.23. A folder is a Qwen3 with
one layer of 64 columns, and golden.json: the SHA-256 of every quantized weight as that tool dequantizes it,
in the tool's own type.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.models import tiny

FOLDER = Path(__file__).parent / "by_others"
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 64,
}
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
LINEARS = [f"{ATTENTION}.{p}_proj" for p in "qkvo"] + [f"{MLP}.{p}_proj" for p in ("gate", "up", "down")]
Weights = Mapping[str, torch.Tensor]


def model(folder: Path) -> Path:
    return tiny(folder, "qwen3", **SIZES)


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


# AutoRound


def auto_round(out: Path, source: Path, *, to: str = "auto_round", **asked: Any) -> Weights:
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    own = {"iters": 0, "disable_opt_rtn": True, "device_map": "cpu"}
    made = AutoRound(load(source), AutoTokenizer.from_pretrained(source), **own, **asked)
    made.quantize_and_save(str(out / "of"), format=to)
    inner = next(path.parent for path in (out / "of").rglob("config.json"))
    for file in inner.iterdir():
        file.rename(out / file.name)
    shutil.rmtree(out / "of")
    return _auto_round_weights(out)


def _auto_round_weights(out: Path) -> Weights:
    if json.loads((out / "config.json").read_text())["quantization_config"]["data_type"] == "mx_fp":
        return _mxfp4_weights(load_file(out / "model.safetensors"))
    from auto_round.export.export_to_awq.utils import dequantize_gemm
    from auto_round_extension.torch import qlinear_torch, qlinear_torch_zp

    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    arrays, found = load_file(out / "model.safetensors"), {}
    for base in (name.removesuffix(".qweight") for name in arrays if name.endswith(".qweight")):
        own = {k: arrays[f"{base}.{k}"] for k in ("qweight", "qzeros", "scales")}
        said = {**settings, **settings.get("extra_config", {}).get(base, {})}
        bits, size = said["bits"], said["group_size"]
        if settings["packing_format"].endswith("awq"):
            numbers = dequantize_gemm(own["qweight"], own["qzeros"], own["scales"], bits, size)
        else:
            kind = qlinear_torch_zp if settings["packing_format"].endswith("auto_gptq") else qlinear_torch
            width, rows = own["qweight"].shape[0] * 32 // bits, own["scales"].shape[1]
            linear = kind.QuantLinear(bits, size, width, rows, bias=False)
            linear.load_state_dict(own)
            numbers = linear(torch.eye(width, dtype=torch.float16))
        found[f"{base}.weight"] = numbers.to(torch.float16).T.contiguous()
    return found


def _mxfp4_weights(arrays: Weights) -> Weights:
    from auto_round.experimental.qmodules.fp4_utils import unpack_fp4_from_uint8

    found = {}
    for base in LINEARS:
        packed, scale = arrays[f"{base}.weight_packed"], arrays[f"{base}.weight_scale"]
        codes = unpack_fp4_from_uint8(packed, packed.shape[0], 2 * packed.shape[1], torch.float32)
        steps = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
        found[f"{base}.weight"] = codes.reshape(steps.shape) * steps
    return found


# BitNet, by the packing of transformers


def bitnet(out: Path, source: Path, *, linear_class: str) -> Weights:
    from transformers.integrations.bitnet import pack_weights, unpack_weights

    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitnet",
        "linear_class": linear_class,
        "quantization_mode": "offline",
        "modules_to_not_convert": ["lm_head"],
    }
    arrays = load_file(source / "model.safetensors")
    found = {}
    for base in LINEARS:
        weight = arrays[f"{base}.weight"].float()
        step = weight.abs().mean()
        packed = pack_weights((weight / step).round().clamp(-1, 1))
        scale = (1 / step if linear_class == "bitlinear" else step).to(torch.bfloat16).reshape(1)
        arrays |= {f"{base}.weight": packed, f"{base}.weight_scale": scale}
        codes = unpack_weights(packed, torch.float32)
        # BitLinear divides its products by the scale, AutoBitLinear multiplies them.
        numbers = codes / scale.float() if linear_class == "bitlinear" else codes * scale.float()
        found[f"{base}.weight"] = numbers + 0  # a product of -0 is one of 0
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return found


# HQQ, as transformers 4 stores its state dict


def hqq(
    out: Path, source: Path, *, dtype: torch.dtype = torch.bfloat16, optimize: bool = True, **asked: Any
) -> Weights:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = json.loads((source / "config.json").read_text())
    own = BaseQuantizeConfig(**asked)
    own["weight_quant_params"]["optimize"] = optimize  # zero points stay whole numbers without
    config["quantization_config"] = {"quant_config": own, "quant_method": "hqq", "skip_modules": ["lm_head"]}
    arrays, found = load_file(source / "model.safetensors"), {}
    for base in LINEARS:
        linear = torch.nn.Linear(1, 1, bias=False)
        linear.weight.data = arrays.pop(f"{base}.weight")
        linear.in_features, linear.out_features = linear.weight.shape[1], linear.weight.shape[0]
        made = HQQLinear(linear, own, compute_dtype=dtype, device="cpu")
        state = {key: value for key, value in made.state_dict().items() if value is not None}
        arrays |= {f"{base}.{key}": value.detach().contiguous() for key, value in state.items()}
        found[f"{base}.weight"] = made.dequantize()
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    (out / "config.json").write_text(json.dumps(config))
    return found


# torchao's classes, as its own safetensors module flattens them


def torchao(out: Path, source: Path, *, quantize: Callable[[torch.Tensor], Any], kind: str) -> Weights:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    config = json.loads((source / "config.json").read_text())
    data = {"granularity": {"_type": "PerRow", "_data": {"dim": -1}, "_version": 1}}
    config["quantization_config"] = {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": kind, "_version": 2, "_data": data}},
    }
    arrays, found = dict(load_file(source / "model.safetensors")), {}
    for base in LINEARS:
        made = quantize(arrays[f"{base}.weight"])
        arrays[f"{base}.weight"] = made
        found[f"{base}.weight"] = int4_numbers(made) if kind == INT4 else made.dequantize()
    flat, metadata = flatten_tensor_state_dict(arrays)
    save_file({k: v.contiguous() for k, v in flat.items()}, out / "model.safetensors", metadata)
    (out / "config.json").write_text(json.dumps(config))
    return found


INT4 = "Int4WeightOnlyConfig"


def _int4_tensor(weight: torch.Tensor) -> Any:
    """What `Int4Tensor.from_hp` makes on a GPU: the arithmetic of fbgemm_gpu's int4_row_quantize_zp."""
    from torchao.quantization import Int4Tensor

    size, (rows, _) = 32, weight.shape
    groups = weight.float().reshape(rows, -1, size)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low).clamp(min=1e-6) / 15
    codes = ((groups - low) / step).round().clamp(0, 15).to(torch.int8).reshape(rows, -1) - 8
    packed = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
    turned = [x.squeeze(-1).t().contiguous().to(weight.dtype) for x in (step, low + 8 * step)]
    return Int4Tensor(packed, *turned, block_size=[1, size], shape=weight.shape)


def int4_numbers(made: Any) -> torch.Tensor:
    low, high = (made.qdata << 4) >> 4, made.qdata >> 4
    codes = torch.stack([low, high], -1).flatten(-2).to(made.scale.dtype)
    scale, middle = (x.t().repeat_interleave(32, 1) for x in (made.scale, made.zero_point))
    return codes * scale + middle


def _of_torchao(name: str, **asked: Any) -> Callable[[torch.Tensor], Any]:
    def make(weight: torch.Tensor) -> Any:
        from torchao import quantization

        own = {k: v() if isinstance(v, type) else v for k, v in asked.items()}
        return getattr(quantization, name).from_hp(weight, **own)

    return make


def _blocks(weight: torch.Tensor) -> Any:
    from torchao.quantization import Float8Tensor, PerBlock

    return Float8Tensor.from_hp(weight, granularity=PerBlock([32, 32]))


def _per_tensor(weight: torch.Tensor) -> Any:
    from torchao.quantization import Float8Tensor, PerTensor

    return Float8Tensor.from_hp(weight, granularity=PerTensor())


def _asymmetric(weight: torch.Tensor) -> Any:
    from torchao.quantization import IntxUnpackedToInt8Tensor, MappingType

    asymmetric = {"mapping_type": MappingType.ASYMMETRIC}
    return IntxUnpackedToInt8Tensor.from_hp(weight, (1, 32), torch.int4, **asymmetric)


# AMD Quark


def quark(out: Path, source: Path, *, weight: str, inputs: str = "", **asked: Any) -> Weights:
    from quark.torch import ModelQuantizer, export_safetensors, import_model_from_safetensors
    from quark.torch.quantization.config import config as specs

    def spec(name: str, own: Mapping[str, Any]) -> Any:
        return getattr(specs, name)(**own).to_quantization_spec()

    dynamic = {"is_dynamic": True, "ch_axis": 1} if inputs.endswith("PerChannelSpec") else {}
    dynamic |= {"symmetric": True} if inputs.startswith("Int8PerChannel") else {}
    still = {} if dynamic else {"is_dynamic": False}
    layer = specs.QLayerConfig(
        weight=spec(weight, asked),
        input_tensors=spec(inputs, dynamic or {**still, "observer_method": "min_max"}) if inputs else None,
    )
    quantizer = ModelQuantizer(specs.QConfig(global_quant_config=layer, exclude=["lm_head"]))
    loader = torch.utils.data.DataLoader(torch.arange(32).reshape(2, 16) % 64)
    made = quantizer.freeze(quantizer.quantize_model(load(source), loader))
    export_safetensors(made, str(out), custom_mode="quark", weight_format="real_quantized")
    again = import_model_from_safetensors(load(source), str(out))
    linears = {base: again.get_submodule(base) for base in LINEARS}
    return {f"{base}.weight": each._get_qweight(each.weight) for base, each in linears.items()}


Maker = Callable[[Path, Path], Weights]
MAKERS: dict[str, Maker] = {
    "auto-round-mixed": partial(
        auto_round,
        scheme="W4A16",
        group_size=32,
        layer_config={
            f"{MLP}.down_proj": {"bits": 8, "group_size": 16},
            f"{ATTENTION}.v_proj": {"bits": 16},
        },
    ),
    "auto-round-w2-asym": partial(auto_round, scheme="W2A16", sym=False, group_size=32),
    "auto-round-w3": partial(auto_round, scheme="W3A16", group_size=32),
    "auto-round-awq": partial(auto_round, to="auto_round:auto_awq", scheme="W4A16", sym=False, group_size=32),
    "auto-round-mxfp4": partial(auto_round, scheme="MXFP4"),
    "hqq-4": partial(hqq, nbits=4, group_size=32, axis=1),
    "hqq-4-whole": partial(hqq, nbits=4, group_size=32, axis=1, optimize=False),
    "hqq-4-axis-0": partial(hqq, nbits=4, group_size=64, axis=0),
    "hqq-8-float": partial(hqq, nbits=8, group_size=32, axis=1, view_as_float=True, dtype=torch.float16),
    "hqq-3": partial(hqq, nbits=3, group_size=32, axis=1, dtype=torch.float16),
    "hqq-2-axis-0": partial(hqq, nbits=2, group_size=16, axis=0, dtype=torch.float32),
    "hqq-1": partial(hqq, nbits=1, group_size=32, axis=1),
    "torchao-fp8": partial(
        torchao, quantize=_of_torchao("Float8Tensor"), kind="Float8DynamicActivationFloat8WeightConfig"
    ),
    "torchao-fp8-tensor": partial(torchao, quantize=_per_tensor, kind="Float8WeightOnlyConfig"),
    "torchao-fp8-blocks": partial(torchao, quantize=_blocks, kind="Float8WeightOnlyConfig"),
    "torchao-int4": partial(torchao, quantize=_int4_tensor, kind=INT4),
    "torchao-intx": partial(
        torchao,
        quantize=_of_torchao("IntxUnpackedToInt8Tensor", block_size=(1, 32), target_dtype=torch.int4),
        kind="IntxWeightOnlyConfig",
    ),
    "torchao-intx-asym": partial(torchao, quantize=_asymmetric, kind="IntxWeightOnlyConfig"),
    "quark-int4": partial(quark, weight="Int4PerGroupSpec", ch_axis=1, is_dynamic=False, group_size=32),
    "quark-uint4": partial(quark, weight="Uint4PerGroupSpec", ch_axis=1, is_dynamic=False, group_size=32),
    "quark-fp8": partial(
        quark,
        weight="FP8E4M3PerTensorSpec",
        inputs="FP8E4M3PerTensorSpec",
        observer_method="min_max",
        is_dynamic=False,
    ),
    "quark-fp8-rows": partial(
        quark, weight="FP8E4M3PerChannelSpec", inputs="FP8E4M3PerChannelSpec", ch_axis=0, is_dynamic=False
    ),
    "quark-int8": partial(
        quark,
        weight="Int8PerChannelSpec",
        inputs="Int8PerChannelSpec",
        ch_axis=0,
        is_dynamic=False,
        symmetric=True,
    ),
    "quark-mxfp4": partial(
        quark,
        weight="FP4PerGroupSpec",
        ch_axis=-1,
        group_size=32,
        scale_format="e8m0",
        scale_calculation_mode="even",
        is_dynamic=False,
    ),
    "bitnet": partial(bitnet, linear_class="bitlinear"),
    "bitnet-auto": partial(bitnet, linear_class="autobitlinear"),
}


def write(name: str) -> None:
    """Write one of the folders anew."""
    out = FOLDER / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as beside:
        found = MAKERS[name](out, model(Path(beside) / "m"))
    for file in out.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            file.unlink()
    golden = {
        name: {
            "dtype": str(numbers.dtype).removeprefix("torch."),
            "shape": list(numbers.shape),
            "sha256": hashlib.sha256(numbers.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
        }
        for name, numbers in sorted(found.items())
    }
    (out / "golden.json").write_text(json.dumps({"dequantized": golden}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for asked in sys.argv[1:] or MAKERS:
        write(asked)
