"""Conversions between layouts: codes kept to the bit, and files that other people's software reads.

The decoders of GPTQ and AWQ files in here are written from the formats' own documents, one element at
a time, and share nothing with the package.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.values import DenseRows
from qconvert.quant.packed_codes import codes_of as unpacked_codes
from tests.support.commands import made, qconvert
from tests.support.models import stored, tiny

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
IDS = torch.randint(0, 320, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "m", "qwen3", dtype="f16")


def quantized(model: Path, tmp_path: Path, layout: str, scheme: str) -> Path:
    return made("convert", model, "--to", layout, "--scheme", scheme, "-o", tmp_path / f"{layout}-{scheme}")


def codes_of(folder: Path) -> str:
    """The SHA-256 over the integer codes of all weights, in the order of their names."""
    checkpoint, digest = open_checkpoint(folder), hashlib.sha256()
    for name, tensor in sorted(checkpoint.tensors.items()):
        value = checkpoint.reader.read(tensor, 0, tensor.rows)
        if not isinstance(value, DenseRows):
            signed = getattr(tensor.encoding, "table", None) == "int8"
            codes_RI = unpacked_codes(value) ^ np.uint8(0x80 if signed else 0)
            digest.update(name.encode() + codes_RI.tobytes())
    return digest.hexdigest()


def arrays_of(folder: Path, module: str) -> dict[str, np.ndarray]:
    with safe_open(folder / "model.safetensors", "numpy") as file:
        names = [name for name in file.keys() if name.startswith(f"{module}.")]  # noqa: SIM118
        return {name.removeprefix(f"{module}."): file.get_tensor(name) for name in names}


def gptq_weight(folder: Path, module: str) -> np.ndarray:
    """A GPTQ module's weight [out, in], field by field."""
    config = json.loads((folder / "quantize_config.json").read_text())
    for pattern, own in config["dynamic"].items():
        if pattern.startswith("+:") and re.match(pattern.removeprefix("+:"), module):
            config |= own
    bits, first = config["bits"], 1 if config["checkpoint_format"] == "gptq" else 0
    arrays = arrays_of(folder, module)

    def field(words: list[int], index: int) -> int:
        stream = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(words))
        return (stream >> (bits * index)) & ((1 << bits) - 1)

    outs, ins = arrays["scales"].shape[1], len(arrays["g_idx"])
    zeros = [[field(row, n) + first for n in range(outs)] for row in arrays["qzeros"].tolist()]
    weight = np.zeros((outs, ins), np.float64)
    columns = arrays["qweight"].T.tolist()
    for n in range(outs):
        stream = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(columns[n]))
        for k, group in enumerate(arrays["g_idx"].tolist()):
            code = (stream >> (bits * k)) & ((1 << bits) - 1)
            weight[n, k] = float(arrays["scales"][group, n]) * (code - zeros[group][n])
    return weight


def awq_weight(folder: Path, module: str) -> np.ndarray:
    """An AWQ module's weight [out, in], nibble by nibble."""
    arrays = arrays_of(folder, module)
    where = {row: parameter for parameter, row in enumerate([0, 2, 4, 6, 1, 3, 5, 7])}

    def nibble(words: np.ndarray, row: int, out: int) -> int:
        return (int(words[row, out // 8]) >> (4 * where[out % 8])) & 15

    ins, outs = arrays["qweight"].shape[0], arrays["scales"].shape[1]
    size = ins // len(arrays["scales"])
    return np.array(
        [
            [
                float(arrays["scales"][k // size, n])
                * (nibble(arrays["qweight"], k, n) - nibble(arrays["qzeros"], k // size, n))
                for k in range(ins)
            ]
            for n in range(outs)
        ]
    )


def dequantized(folder: Path, tmp_path: Path, module: str) -> np.ndarray:
    out = made("dequantize", folder, "--dtype", "f32", "-o", tmp_path / "plain")
    return arrays_of(out, module)["weight"]


@pytest.mark.parametrize(
    ("stored_as", "layout"),
    [
        *(("int5-g128", "gptq"), ("int5-g128", "awq"), ("gguf", "gptq")),
        *(("nf4", "compressed-tensors"), ("nf4", "mlx")),
    ],
)
def test_groups_that_do_not_divide_a_row_are_refused(
    model: Path, tmp_path: Path, stored_as: str, layout: str
) -> None:
    if stored_as == "gguf":
        flags = ("--pre-tokenizer", "qwen2", "-o", tmp_path / "m.gguf", "-q")
        assert qconvert("to-gguf", model, "--type", "q4_k_m", *flags).code == 0
        source = tmp_path / "m.gguf"
    else:
        to = "bitsandbytes" if stored_as == "nf4" else "compressed-tensors"
        source = quantized(model, tmp_path, to, stored_as)
    wish = ("--scheme", "int4-g96", "--allow-requantize", "-o", tmp_path / "out")
    ran = qconvert("convert", source, "--to", layout, *wish)
    assert ran.code == 1 and not (tmp_path / "out").exists()
    assert "rows of 256 columns are not divisible by group size 96" in ran.err
    assert "sizes that divide: 128, 64, 32, channel" in ran.err


def test_codes_go_round_the_ring_unchanged(model: Path, tmp_path: Path) -> None:
    first = folder = quantized(model, tmp_path, "gptq_v2", "int4-asym-g64")
    for layout in ("compressed-tensors", "awq", "mlx", "gptq_v2"):
        folder = made("convert", folder, "--to", layout, "-o", tmp_path / f"ring-{layout}")
        assert codes_of(folder) == codes_of(first), layout
    before, after = stored(first), stored(folder)
    assert {name: after[name] for name in before} == before


@pytest.mark.parametrize("scheme", ["int2-g32", "int3-asym-g128", "int4-g64", "int8-channel"])
@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_gptq_files_hold_the_numbers_that_we_read(
    model: Path, tmp_path: Path, layout: str, scheme: str
) -> None:
    folder = quantized(model, tmp_path, layout, scheme)
    np.testing.assert_array_equal(gptq_weight(folder, Q), dequantized(folder, tmp_path, Q))


def test_gptq_says_which_modules_differ_from_the_rest(model: Path, tmp_path: Path) -> None:
    rules = ("--rule", "mlp.down=int8-channel", "--rule", "attn.o=int4-asym-g32", "--keep", "layers.0.attn.o")
    asked = ("quantize", model, "--scheme", "int4-g64", *rules, "--layout", "gptq_v2")
    folder = made(*asked, "-o", tmp_path / "mixed")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["sym"]) == (4, 64, True)
    assert config["dynamic"]["+:^" + DOWN.replace(".", "\\.") + r"(?:\.|$)"] == {"bits": 8, "group_size": -1}
    assert config["dynamic"][r"-:^model\.layers\.0\.self_attn\.o_proj(?:\.|$)"] == {}
    for module in (Q, DOWN, "model.layers.1.self_attn.o_proj"):
        plain = dequantized(folder, tmp_path / module, module)
        np.testing.assert_array_equal(gptq_weight(folder, module), plain)
    encodings = {tensor.encoding.label for tensor in open_checkpoint(folder).tensors.values()}
    assert encodings == {"f16", "int4-g64", "int8-channel", "int4-asym-g32"}
    out = made("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / "ct")
    assert codes_of(out) == codes_of(folder) and kinds_of(out) == {"exact"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dynamic": {}}, "codes of 8 bits, but quantization_config says bits 4"),
        ({"bits": 2}, "codes of 4 bits, but quantization_config says bits [2, 8]"),
        ({"dynamic": {"+:.*": {"bits": 8, "group_size": "all"}}}, "group_size is all, not int"),
        ({"dynamic": [1]}, "dynamic is [1], not an object"),
    ],
)
def test_claims_about_single_modules_are_checked(
    model: Path, tmp_path: Path, change: dict[str, object], said: str
) -> None:
    asked = ("quantize", model, "--scheme", "int4-g64", "--rule", "mlp.down=int8-g64", "--layout", "gptq")
    folder = made(*asked, "-o", tmp_path / "mixed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    ran = qconvert("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / "out")
    assert ran.code == 1 and said in ran.err


def test_expressions_from_a_file_are_not_run(model: Path, tmp_path: Path) -> None:
    """One that could mean any module leaves the zeros to say what the grid is; the numbers are the same."""
    folder = quantized(model, tmp_path, "gptq", "int4-g64")
    before = dequantized(folder, tmp_path / "before", Q)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {"+:(a+)+$": {"sym": False}}
    (folder / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).tensors[f"{Q}.weight"].encoding.label == "int4-asym-g64"
    np.testing.assert_array_equal(dequantized(folder, tmp_path / "after", Q), before)


def test_zeros_of_0_are_not_written_as_minus_one(tmp_path: Path) -> None:
    positive = {f"{Q}.weight": np.full((256, 256), 0.5, np.float32)}
    model = tiny(tmp_path / "m", changes=positive)
    asked = ("convert", model, "--to", "gptq", "--scheme", "int4-asym-g64", "-o", tmp_path / "out")
    ran = qconvert(*asked)
    assert ran.code == 1 and f"{Q}.weight: has zeros of 0" in ran.err and "--to gptq_v2" in ran.err


@pytest.mark.parametrize("scheme", ["int4-asym-g32", "int4-channel"])
def test_awq_files_hold_the_numbers_that_we_read(model: Path, tmp_path: Path, scheme: str) -> None:
    folder = quantized(model, tmp_path, "awq", scheme)
    np.testing.assert_array_equal(awq_weight(folder, DOWN), dequantized(folder, tmp_path, DOWN))


def test_compressed_tensors_own_converter_reads_awq_as_we_do(model: Path, tmp_path: Path) -> None:
    from compressed_tensors.entrypoints.convert import AutoAWQConverter  # type: ignore[import-not-found]

    folder = quantized(model, tmp_path, "awq", "int4-asym-g128")
    ours = load_file(
        made("convert", folder, "--to", "compressed-tensors", "-o", tmp_path / "ct") / "model.safetensors"
    )
    theirs = AutoAWQConverter(ignore=["lm_head"]).process(load_file(folder / "model.safetensors"))
    for name in (f"{Q}.weight_packed", f"{Q}.weight_zero_point", f"{DOWN}.weight_scale"):
        assert torch.equal(ours[name], theirs[name].to(ours[name].dtype)), name


def test_columns_in_activation_order_stay_so_or_are_refused(assets: Path, tmp_path: Path) -> None:
    source = assets / "fixtures" / "quantized" / "cut-gptqm-w4-sym-g128-descact"
    kept = made("convert", source, "--to", "gptq_v2", "-o", tmp_path / "v2")
    assert codes_of(kept) == codes_of(source)
    assert json.loads((kept / "config.json").read_text())["quantization_config"]["desc_act"] is True
    np.testing.assert_array_equal(gptq_weight(kept, Q), dequantized(source, tmp_path, Q))
    for layout in ("awq", "compressed-tensors", "mlx"):
        ran = qconvert("convert", source, "--to", layout, "-o", tmp_path / layout)
        assert ran.code == 1 and "g_idx" in ran.err and f"which {layout} cannot hold" in ran.err
    again = made("convert", source, "--to", "awq", "--allow-requantize", "-o", tmp_path / "again")
    assert kinds_of(again) == {"exact", "requantized"}


def kinds_of(folder: Path) -> set[str]:
    manifest = json.loads((folder / "qconvert.json").read_text())
    return {entry["certificate"]["kind"] for entry in manifest["tensors"].values()}


def steps_of(folder: Path) -> float:
    manifest = json.loads((folder / "qconvert.json").read_text())
    return max(float(entry["certificate"].get("max_steps", 0)) for entry in manifest["tensors"].values())


@pytest.mark.parametrize(
    ("source", "layout", "most"),
    [
        ("cut-gptqm-w4-sym-g128", "compressed-tensors", 0.0),
        ("cut-gptqm-w4-sym-g128", "mlx", 0.0),
        ("cut-gptqm-w4-asym-g128-v1", "mlx", 15 * 2**-11),
        ("cut-awq-w4-sym-g128", "gptq", 0.0),
        ("cut-ct-w4a16-sym-g32", "gptq", 0.0),
        ("cut-ct-w3a16-g32", "mlx", 0.0),
        ("cut-ct-mixed-w4g128-w8ch", "mlx", 0.0),
        ("cut-ct-mf-mxfp4", "mlx", 0.0),
        ("cut-ct-mf-nvfp4", "compressed-tensors", 0.0),
        ("cut-ct-w8a8-int8", "bitsandbytes", 1e-5),
        ("cut-bnb-int8", "int-quantized", 1e-5),
        ("cut-bnb-nf4-dq", "bitsandbytes", 0.0),
        ("cut-fp8-block-hand", "compressed-tensors", 0.0),
        ("cut-ct-fp8-block", "fp8", 0.0),
        ("cut-torchao-int8", "int-quantized", 0.0),
    ],
)
def test_a_certificate_says_how_far_a_weight_has_moved(
    assets: Path, tmp_path: Path, source: str, layout: str, most: float
) -> None:
    folder = assets / "fixtures" / "quantized" / source
    out = made("convert", folder, "--to", layout, "-o", tmp_path / "out")
    assert steps_of(out) <= most
    assert kinds_of(out) <= ({"exact"} if most == 0 else {"exact", "measured"})
    assert codes_of(out) == codes_of(folder)
    ran = qconvert("verify", out, "--against", folder)
    assert ran.code == 0, ran.err


def test_codes_that_another_grid_cannot_place_are_refused(assets: Path, tmp_path: Path) -> None:
    source = assets / "fixtures" / "quantized" / "cut-mlx-q8-g64"  # bf16 mins of up to 255 steps
    asked = ("convert", source, "--to", "compressed-tensors", "-o", tmp_path / "out")
    ran = qconvert(*asked)
    assert ran.code == 1 and "steps" in ran.err and "--allow-requantize" in ran.err
    assert 0.1 < steps_of(made(*asked, "--allow-requantize")) <= 0.5


@pytest.mark.parametrize("layout", ["gptq", "awq", "mlx", "fp8", "compressed-tensors"])
def test_a_code_book_of_quantiles_is_requantized_only_when_asked(
    assets: Path, tmp_path: Path, layout: str
) -> None:
    source = assets / "fixtures" / "quantized" / "cut-bnb-nf4-dq"
    ran = qconvert("convert", source, "--to", layout, "-o", tmp_path / "out")
    assert ran.code == 1 and "nf4-g64" in ran.err and "--allow-requantize" in ran.err
    if layout != "fp8":
        out = made("convert", source, "--to", layout, "--allow-requantize", "-o", tmp_path / "out")
        assert kinds_of(out) >= {"requantized"}


def test_quantize_writes_any_layout_of_integers_at_once(model: Path, tmp_path: Path) -> None:
    asked = ("quantize", model, "--scheme", "int4-g64", "--layout", "awq")
    out = made(*asked, "-o", tmp_path / "at-once")
    assert stored(out) == stored(quantized(model, tmp_path, "awq", "int4-g64"))
    assert "with an AWQ backend, load this folder" in (out / "README.md").read_text()
    ran = qconvert(*asked, "--rule", "embed=int4-g64", "-o", tmp_path / "table")
    assert ran.code == 1 and "awq holds no quantized embedding" in ran.err


@pytest.mark.parametrize(
    ("source", "layout", "said"),
    [
        ("cut-ct-w8a8-int8", "int-quantized", None),
        ("cut-ct-w8a8-int8", "bitsandbytes", None),
        ("cut-ct-w8a8-int8", "gptq", "the source's loaders quantize activations to 8 bits, those of this"),
        ("cut-ct-w8a8-int8", "compressed-tensors", "the source's loaders quantize activations to 8 bits"),
        ("cut-torchao-int8", "int-quantized", "loaders of this layout quantize activations to 8 bits"),
        ("cut-fp8-block-hand", "compressed-tensors", None),
    ],
)
def test_what_becomes_of_activations_is_told(
    assets: Path, tmp_path: Path, source: str, layout: str, said: str | None
) -> None:
    folder = assets / "fixtures" / "quantized" / source
    ran = qconvert("convert", folder, "--to", layout, "--no-verify", "-o", tmp_path / "out")
    assert ran.code == 0 and (said in ran.err if said else "activations" not in ran.err), ran.err
    warnings = json.loads((tmp_path / "out" / "qconvert.json").read_text())["warnings"]
    assert any("activations" in warning for warning in warnings) is bool(said)


def test_torchao_in_a_form_that_is_not_read(assets: Path, tmp_path: Path) -> None:
    folder = tmp_path / "int4"
    shutil.copytree(assets / "fixtures" / "quantized" / "cut-torchao-int8", folder)
    arrays = load_file(folder / "model.safetensors")
    half = {n: a[:, ::2].view(torch.uint8).contiguous() for n, a in arrays.items() if n.endswith("_qdata")}
    save_file(arrays | half, folder / "model.safetensors", {"format": "pt"})
    ran = qconvert("convert", folder, "--to", "int-quantized", "-o", tmp_path / "out")
    assert ran.code == 1 and "_weight_qdata: u8" in ran.err and "int8 ones are" in ran.err
