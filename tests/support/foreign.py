"""What a file's quantized weights stand for, by readers that are not ours, as exact numbers in float64.

Packed integers of compressed-tensors are unpacked by its own library, GGUF by the gguf package, MLX's
words by mlx, bitsandbytes' codes by its tables, small floats by torch; the words of GPTQ and AWQ here, from
the formats' own documents. Names are those of transformers' classes, experts one by one.

A weight is a pair: its numbers [N, K], and the step of the grid under each of them, to be broadcast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

Weight = tuple[np.ndarray, np.ndarray]
Arrays = Mapping[str, torch.Tensor]
# OCP Microscaling Formats v1.0: E2M1.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([_E2M1, -_E2M1])
_AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]


def weights(path: Path) -> dict[str, Weight]:
    """The quantized weights of a folder or a GGUF file, and the plain matrices (whose step is 0)."""
    if path.is_file():
        return dict(_gguf(path))
    config = json.loads((path / "config.json").read_text())
    settings = config.get("quantization_config", {})
    arrays = load_file(path / "model.safetensors")
    method = settings.get("quant_method") or ("mlx" if "quantization" in config else "plain")
    return dict(_READERS[method](arrays, config))


def _wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64).numpy()


def _spread(scales_NG: np.ndarray, width: int) -> np.ndarray:
    return np.repeat(scales_NG, width // scales_NG.shape[-1], axis=-1)


def _bases(arrays: Arrays, ending: str) -> Iterator[str]:
    return (name.removesuffix(ending) for name in arrays if name.endswith(ending))


def _plain(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    for name, tensor in arrays.items():
        if tensor.dim() == 2 and tensor.dtype in (torch.bfloat16, torch.float16, torch.float32):
            yield name, (_wide(tensor), np.zeros(1))
        elif tensor.dim() == 3 and name.endswith("_proj"):  # gpt-oss: [experts, in, out]
            numbers = _wide(tensor).swapaxes(1, 2)
            yield from _experts(name, numbers, np.zeros((*numbers.shape[:2], 1)))


def _experts(name: str, numbers_ENK: np.ndarray, steps_ENK: np.ndarray) -> Iterator[tuple[str, Weight]]:
    """gpt-oss's stacks: rows of gate and up take turns."""
    before = name.rsplit(".", 1)[0]
    for expert, (numbers, steps) in enumerate(zip(numbers_ENK, steps_ENK, strict=True)):
        if name.endswith("gate_up_proj"):
            for first, part in enumerate(("gate", "up")):
                yield f"{before}.{expert}.{part}_proj.weight", (numbers[first::2], steps[first::2])
        else:
            yield f"{before}.{expert}.down_proj.weight", (numbers, steps)


def _compressed(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    bits_of = {
        group["weights"]["num_bits"] for group in config["quantization_config"]["config_groups"].values()
    }
    for base in (base for base in _bases(arrays, "_scale") if {base, f"{base}_packed"} & set(arrays)):
        scale, packed = arrays[f"{base}_scale"], arrays.get(f"{base}_packed")
        divisor = float(arrays[f"{base}_global_scale"]) if f"{base}_global_scale" in arrays else 1.0
        if packed is None:
            codes = _wide(arrays[base])
            rows = np.repeat(_wide(scale), -(-codes.shape[0] // max(1, len(scale))), axis=0)
            steps = _spread(rows.reshape(len(rows), -1), codes.shape[1])
            yield base, (codes * steps, steps)
        elif packed.dtype is torch.uint8:
            exponents = np.ldexp(1.0, scale.numpy().astype(int) - 127) if scale.dtype is torch.uint8 else None
            steps = (_wide(scale) if exponents is None else exponents) / np.float32(divisor)
            codes = E2M1[_nibbles(packed.numpy())]
            steps = _spread(steps.astype(np.float32).astype(np.float64), codes.shape[1])
            yield base, (codes * steps, steps)
        else:
            shape = torch.Size(arrays[f"{base}_shape"].tolist())
            bits = next(b for b in sorted(bits_of) if -(-shape[1] * b // 32) == packed.shape[1])
            codes = _wide(unpack_from_int32(packed, bits, shape))
            zeros = np.zeros_like(_wide(scale))
            if (stored := arrays.get(f"{base}_zero_point")) is not None:
                zeros = _wide(unpack_from_int32(stored, bits, torch.Size(scale.shape), packed_dim=0))
            steps = _spread(_wide(scale), shape[1])
            yield base, ((codes - _spread(zeros, shape[1])) * steps, steps)
    yield from _rest(arrays)


def _rest(arrays: Arrays) -> Iterator[tuple[str, Weight]]:
    """Linears that stayed numbers."""
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    for name, tensor in arrays.items():
        if name.endswith("_proj.weight") and tensor.dim() == 2 and tensor.dtype in kinds:
            yield name, (_wide(tensor), np.zeros(1))


def _nibbles(bytes_NB: np.ndarray, *, high_first: bool = False) -> np.ndarray:
    pair = (bytes_NB >> 4, bytes_NB & 15) if high_first else (bytes_NB & 15, bytes_NB >> 4)
    return np.stack(pair, axis=-1).reshape(*bytes_NB.shape[:-1], -1)


def _fields(words_RW: np.ndarray, bits: int) -> np.ndarray:
    """A little-endian stream of fields along each row of 32-bit words, bit by bit."""
    stream = np.unpackbits(
        np.ascontiguousarray(words_RW.astype("<i4")).view(np.uint8), axis=1, bitorder="little"
    )
    count = stream.shape[1] // bits
    return stream[:, : count * bits].reshape(len(stream), count, bits) @ (1 << np.arange(bits))


def _gptq(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    settings = config["quantization_config"]
    first = 1 if settings["checkpoint_format"] == "gptq" else 0
    for base in _bases(arrays, ".qweight"):
        groups, scales = arrays[f"{base}.g_idx"].numpy(), _wide(arrays[f"{base}.scales"])
        bits = arrays[f"{base}.qweight"].shape[0] * 32 // len(groups)
        codes = _fields(arrays[f"{base}.qweight"].numpy().T, bits)
        zeros = (_fields(arrays[f"{base}.qzeros"].numpy(), bits) + first)[:, : scales.shape[1]]
        steps = scales[groups].T
        yield f"{base}.weight", ((codes - zeros[groups].T) * steps, steps)
    yield from _rest(arrays)


def _auto_round(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    """GPTQ's words with zeros less one, or as they are, and no g_idx."""
    settings = config["quantization_config"]
    less = {"auto_round:auto_gptq": 1, "auto_round": 0}[settings["packing_format"]]
    for base in _bases(arrays, ".qweight"):
        bits = settings.get("extra_config", {}).get(base, settings)["bits"]
        codes, scales = _fields(arrays[f"{base}.qweight"].numpy().T, bits), _wide(arrays[f"{base}.scales"])
        zeros = _fields(arrays[f"{base}.qzeros"].numpy(), bits) + less
        size = codes.shape[1] // len(scales)
        steps = np.repeat(scales.T, size, 1)
        yield f"{base}.weight", ((codes - np.repeat(zeros.T, size, 1)) * steps, steps)
    yield from _rest(arrays)


def _awq(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    def columns(words: torch.Tensor) -> np.ndarray:
        found = _fields(words.numpy(), 4).reshape(len(words), -1, 8)
        ordered = np.empty_like(found)
        ordered[..., _AWQ_COLUMNS] = found
        return ordered.reshape(len(words), -1)

    for base in _bases(arrays, ".qweight"):
        codes, scales = columns(arrays[f"{base}.qweight"]), _wide(arrays[f"{base}.scales"])
        size = len(codes) // len(scales)
        zeros, steps = (np.repeat(a, size, 0) for a in (columns(arrays[f"{base}.qzeros"]), scales))
        yield f"{base}.weight", (((codes - zeros) * steps).T, steps.T)
    yield from _rest(arrays)


def _mlx(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    import mlx.core as mx

    for base in _bases(arrays, ".scales"):
        said = {**config["quantization"], **(config["quantization"].get(base) or {})}
        words, scales = arrays[f"{base}.weight"], arrays[f"{base}.scales"]
        mode = {key: said[key] for key in ("group_size", "bits")} | {"mode": said.get("mode", "affine")}
        kind = mx.uint8 if scales.dtype is torch.uint8 else mx.float32
        own = mx.array(scales.numpy() if kind is mx.uint8 else scales.float().numpy())
        mins = arrays.get(f"{base}.biases")
        biases = None if mins is None else mx.array(mins.float().numpy())
        made = mx.dequantize(mx.array(words.numpy()), own, biases, **mode, dtype=mx.float32)
        steps = _wide(scales)
        if kind is mx.uint8:
            bytes_ = scales.view(torch.float8_e4m3fn) if mode["mode"] == "nvfp4" else None
            steps = np.ldexp(1.0, scales.numpy().astype(int) - 127) if bytes_ is None else _wide(bytes_)
        numbers = np.array(made).astype(np.float64)
        each = _spread(steps, numbers.shape[-1])
        if numbers.ndim == 2:
            yield f"{base}.weight", (numbers, each)
            continue
        before, last = re.sub("switch_mlp", "experts", base).rsplit(".", 1)
        for expert in range(len(numbers)):
            yield f"{before}.{expert}.{last}.weight", (numbers[expert], each[expert])
    yield from _rest(arrays)


def _bitsandbytes(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    from bitsandbytes import functional

    for base in _bases(arrays, ".SCB"):
        steps = _wide(arrays[f"{base}.SCB"])[:, None] * np.float32(7.874015718698502e-3)
        yield f"{base}.weight", (_wide(arrays[f"{base}.weight"]) * steps, steps)
    for base in _bases(arrays, ".weight.absmax"):
        own = {
            n.removeprefix(f"{base}.weight."): a for n, a in arrays.items() if n.startswith(f"{base}.weight.")
        }
        state = functional.QuantState.from_dict(own, device=torch.device("cpu"))
        state.dtype = torch.float32
        numbers = _wide(functional.dequantize_4bit(arrays[f"{base}.weight"], state))
        yield f"{base}.weight", (numbers, np.full((1, 1), np.inf))
    yield from _rest(arrays)


def _fp8(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    for base in _bases(arrays, "_scale_inv"):
        codes, scales = _wide(arrays[base]), _wide(arrays[f"{base}_scale_inv"])
        rows, columns = codes.shape
        steps = np.repeat(np.repeat(scales, 128, 0)[:rows], 128, 1)[:, :columns]
        yield base, (codes * steps, steps)
    yield from _rest(arrays)


def _mxfp4(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    for base in _bases(arrays, "_blocks"):
        steps = np.ldexp(1.0, arrays[f"{base}_scales"].numpy().astype(int) - 127)
        codes = _nibbles(arrays[f"{base}_blocks"].numpy()).reshape(*steps.shape[:2], -1)
        each = _spread(steps, codes.shape[-1])
        yield from _experts(base, E2M1[codes] * each, each)
    yield from _rest(arrays)


def _torchao(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    for base in _bases(arrays, "._weight_qdata"):
        stored, steps = arrays[f"{base}._weight_qdata"], _wide(arrays[f"{base}._weight_scale"])
        zeros = arrays.get(f"{base}._weight_zero_point", torch.zeros(steps.shape))
        if zeros.is_floating_point() and steps.shape[1] == stored.shape[0] != steps.shape[0]:  # Int4Tensor
            codes = _nibbles(stored.view(torch.uint8).numpy() ^ 0x88).astype(float) - 8
            each, middles = (_spread(numbers.T, codes.shape[1]) for numbers in (steps, _wide(zeros)))
            yield f"{base}.weight", (codes * each + middles, each)
            continue
        codes = _wide(stored)
        each, whole = (_spread(numbers, codes.shape[1]) for numbers in (steps, _wide(zeros)))
        yield f"{base}.weight", ((codes - whole) * each, each)
    yield from _rest(arrays)


_ROLES = {
    "attn_output": "self_attn.o",
    "attn_q": "self_attn.q",
    "attn_k": "self_attn.k",
    "attn_v": "self_attn.v",
}
_ROLES |= {f"ffn_{part}": f"mlp.{part}" for part in ("gate", "up", "down")}


def _gguf(path: Path) -> Iterator[tuple[str, Weight]]:
    import gguf

    reader = gguf.GGUFReader(path)
    others = {
        tensor.name: np.array(tensor.data) for tensor in reader.tensors if tensor.name.endswith(".scale")
    }
    for tensor in reader.tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+?)(_exps)?\.weight", tensor.name)
        if match is None or match[2] not in _ROLES:
            continue
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float64)
        numbers = numbers * others.get(tensor.name.replace(".weight", ".scale"), np.ones(1))
        name = f"model.layers.{match[1]}.{_ROLES[match[2]]}_proj.weight"
        steps = np.full((1, 1), np.inf)
        if not match[3]:
            yield name, (numbers, steps)
            continue
        for expert, own in enumerate(numbers):
            yield name.replace("mlp.", f"mlp.experts.{expert}."), (own, steps)


def _modelopt(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    for base in _bases(arrays, ".weight_scale"):
        codes, scale = arrays[f"{base}.weight"], arrays[f"{base}.weight_scale"]
        second = arrays.get(f"{base}.weight_scale_2")
        if second is not None:
            width = codes.shape[1] * 2
            steps = _spread((_wide(scale).astype(np.float32) * second.numpy()).astype(np.float64), width)
            yield f"{base}.weight", (E2M1[_nibbles(codes.numpy())] * steps, steps)
        elif codes.dtype is torch.float8_e4m3fn:
            exponents = scale.dtype is torch.uint8
            grid = np.ldexp(1.0, scale.numpy().astype(int) - 127) if exponents else _wide(scale)
            grid = grid.reshape(grid.shape[0], -1) if grid.ndim else grid.reshape(1, 1)
            rows = np.repeat(grid, codes.shape[0] // len(grid), axis=0)
            steps = _spread(rows, codes.shape[1])
            yield f"{base}.weight", (_wide(codes) * steps, steps)
    yield from _rest(arrays)


# HQQ's codes by what `core/bitpack.py` unpacks: rows folded into one, from the highest bits on.
_HQQ_FOLDS = {2: (4, 2), 3: (10, 3), 4: (2, 4), 5: (1, 8), 6: (1, 8), 8: (1, 8)}


def _hqq(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    for base in _bases(arrays, ".W_q"):
        bits, size = (int(arrays[f"{base}.{key}"]) for key in ("nbits", "group_size"))
        rows, width = arrays[f"{base}.shape"].tolist()
        folds, each = _HQQ_FOLDS[bits]
        words = arrays[f"{base}.W_q"].numpy().astype(np.int64)
        parts = [words >> each * (folds - 1 - place) & (1 << each) - 1 for place in range(folds)]
        codes = np.concatenate(parts)[: rows * width // size]
        scale, zero = (_wide(arrays[f"{base}.{key}"]) for key in ("scale", "zero"))
        steps = np.broadcast_to(scale, codes.shape)
        yield f"{base}.weight", tuple(a.reshape(rows, width) for a in ((codes - zero) * steps, steps))
    yield from _rest(arrays)


def _quark(arrays: Arrays, config: Any) -> Iterator[tuple[str, Weight]]:
    def words(array: torch.Tensor) -> np.ndarray:
        found = _fields(array.numpy(), 4).reshape(len(array), -1, 8)
        ordered = np.empty_like(found)
        ordered[..., _AWQ_COLUMNS] = found
        return ordered.reshape(len(array), -1)

    settings = config["quantization_config"]
    for base in _bases(arrays, ".weight_scale"):
        form = settings["layer_quant_config"].get(base) or settings["global_quant_config"]
        kind = form["weight"]["dtype"]
        codes, scale = arrays[f"{base}.weight"], arrays[f"{base}.weight_scale"]
        if kind in ("int4", "uint4"):
            size = len(codes) // len(scale)
            pair = words(codes), np.repeat(words(arrays[f"{base}.weight_zero_point"]), size, 0)
            signed = [(each ^ 8) - 8 if kind == "int4" else each for each in pair]
            steps = np.repeat(_wide(scale), size, 0)
            yield f"{base}.weight", (((signed[0] - signed[1]) * steps).T, steps.T)
        elif kind == "fp4":
            steps = _spread(np.ldexp(1.0, scale.numpy().astype(int) - 127), codes.shape[1] * 2)
            yield f"{base}.weight", (E2M1[_nibbles(codes.numpy())] * steps, steps)
        else:
            steps = np.broadcast_to(_wide(scale).reshape(-1, 1), codes.shape)
            yield f"{base}.weight", (_wide(codes) * steps, steps)
    yield from _rest(arrays)


_READERS: Mapping[str, Callable[[Arrays, Any], Iterator[tuple[str, Weight]]]] = {
    "plain": _plain,
    "modelopt": _modelopt,
    "fbgemm_fp8": _modelopt,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "awq": _awq,
    "mlx": _mlx,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
    "hqq": _hqq,
    "quark": _quark,
}
