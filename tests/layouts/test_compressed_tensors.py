"""pack-quantized held against the tools that define it: llm-compressor's files, transformers' loading.

Where transformers does not load a kind of output, that is stated here too: `qconvert.plan.loader_notices`
tells
the user what these tests have seen.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType, TensorSpec
from qconvert.core.encodings import AffineInt, ModelTensor
from qconvert.core.values import AffineIntRows
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.formats.io.byte_source import LocalBytes
from qconvert.formats.layouts.compressed_tensors import CompressedTensors
from qconvert.formats.layouts.compressed_tensors.config import patterns, quantization_config
from qconvert.formats.layouts.compressed_tensors.reading import open_compressed_tensors
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.support.commands import made
from tests.support.models import stored, tiny

IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(0))
TOLERANCE = 1e-4
WHOLE = transformers.CompressedTensorsConfig(dequantize=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An untied bf16 Qwen2, with biases; transformers' progress bars are off while it is used."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    yield tiny(tmp_path_factory.mktemp("model") / "m", "qwen2", tied=False)
    transformers.utils.logging.set_verbosity_warning()


def bind(source: Any, config: dict[str, Any]) -> dict[str, ModelTensor]:
    return open_compressed_tensors(source, config)[1]


def our_logits(folder: Path) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    decoder = load_decoder(DecoderConfig.from_hf(checkpoint.config), CheckpointWeights(checkpoint))
    return decoder.logits(decoder.hidden(IDS))


def their_logits(folder: Path, **how: Any) -> torch.Tensor:
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **how)
    with torch.no_grad():
        logits: torch.Tensor = loaded(IDS).logits
    return logits


def assert_same_logits(folder: Path, **how: Any) -> None:
    ours = our_logits(folder)
    assert ours.abs().max() > 1
    assert (ours - their_logits(folder, **how)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "wish",
    [
        ("--bits", "4"),
        ("--bits", "8", "--group-size", "64", "--min-max", "--keep", "attn.o", "--dtype", "f16"),
        ("--scheme", "int3-channel", "--rule", "lm_head=int3-channel"),
        ("--scheme", "int7-g32", "--rule", "layers.1.attn.qkv=int8", "--rule", "lm_head=int2-channel"),
        ("--bits", "4", "--rule", "re:layers.0=keep"),
    ],
    ids=" ".join,
)
def test_transformers_computes_our_logits(model: Path, tmp_path: Path, wish: tuple[str, ...]) -> None:
    assert_same_logits(made("quantize", model, *wish, "-o", tmp_path / "q"))


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_transformers_computes_our_logits_of_each_family(model: Path, tmp_path: Path, family: str) -> None:
    tied = tiny(tmp_path / family, family, tied=family != "mistral", biases=family == "llama", dtype="f16")
    assert_same_logits(made("quantize", tied, "--bits", 4, "-o", tmp_path / "q"))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("scheme", ["int4-asym-g64", "int5-asym-channel"])
def test_an_asymmetric_grid_loads_when_transformers_dequantizes_it(
    model: Path, tmp_path: Path, scheme: str
) -> None:
    wish = ("quantize", model, "--scheme", scheme, "--dtype", "f32", "-o", tmp_path / "q")
    assert_same_logits(made(*wish), quantization_config=WHOLE)
    with pytest.raises(RuntimeError, match="mismatched_sizes"):
        their_logits(tmp_path / "q")


def test_no_kind_of_loading_reads_a_quantized_embedding(model: Path, tmp_path: Path) -> None:
    quantized = made("quantize", model, "--bits", 4, "--rule", "embed=int8", "-o", tmp_path / "q")
    with pytest.raises(AttributeError, match="'Embedding' object has no attribute 'weight'"):
        their_logits(quantized)
    assert our_logits(quantized).isfinite().all()


def test_fused_linears_are_lost_on_transformers_and_exact_here(model: Path, tmp_path: Path) -> None:
    fused = made("fuse", model, "-o", tmp_path / "f")
    assert (our_logits(fused) - our_logits(model)).abs().max() < 1e-5
    assert (their_logits(fused) - our_logits(model)).abs().max() > 1
    quantized = made("quantize", model, "--bits", 4, "--fuse", "qkv", "-o", tmp_path / "q")
    apart = made("unfuse", quantized, "-o", tmp_path / "u")
    assert (our_logits(quantized) - our_logits(apart)).abs().max() < 1e-5
    assert_same_logits(apart)


GOLDEN = [
    "ct-w4a16-sym-g128",
    "cut-ct-w4a16-asym-g128",
    "cut-ct-w3a16-g32",
    "cut-ct-w8a16-channel",
    "cut-ct-w4a16-sym-g32",
    "cut-ct-gptq-w4a16-sym-g128",
    "cut-ct-mixed-w4g128-w8ch",
]


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_llm_compressor_dequantize_to_its_bytes(assets: Path, tmp_path: Path, name: str) -> None:
    folder = assets / "fixtures" / "quantized" / name
    golden = json.loads((folder / "golden.json").read_text())["dequantized"]
    arrays = stored(made("dequantize", folder, "-o", tmp_path / "d"))
    assert set(arrays) == set(golden)
    for tensor, (_, shape, data) in arrays.items():
        assert list(shape) == golden[tensor]["shape"]
        assert hashlib.sha256(data).hexdigest() == golden[tensor]["sha256"], tensor


@pytest.mark.parametrize("name", GOLDEN)
def test_files_of_llm_compressor_fuse_and_unfuse_exactly(assets: Path, tmp_path: Path, name: str) -> None:
    folder = assets / "fixtures" / "quantized" / name
    fused = made("fuse", folder, "-o", tmp_path / "f")
    assert stored(made("unfuse", fused, "-o", tmp_path / "u")) == stored(folder)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("rows", [32, 37])
def test_packing_is_the_librarys(bits: int, rows: int) -> None:
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (rows, 96), dtype=np.uint8)
    zeros = random.integers(0, 1 << bits, (rows, 3), dtype=np.uint8)
    encoding = AffineInt(bits, 32, symmetric=False, scale_dtype=DType.F32)
    value = AffineIntRows(codes, np.ones((rows, 3), "f4"), zeros, encoding)
    parts = {
        p.name: p.rows
        for p in CompressedTensors().encode(ModelTensor("w.weight", (rows, 96), encoding), 0, value)
    }

    def theirs(unsigned: np.ndarray, dim: int) -> np.ndarray:
        signed = torch.from_numpy(unsigned.astype(np.int16) - (1 << bits - 1)).to(torch.int8)
        return pack_to_int32(signed, bits, packed_dim=dim).numpy()

    assert np.array_equal(parts["w.weight_packed"], theirs(codes, 1))
    assert np.array_equal(parts["w.weight_zero_point"], theirs(zeros, 0))
    assert parts["w.weight_shape"].ravel().tolist() == [rows, 96]


# What bind makes of arrays that do not belong together.


class Headers:
    """A source with no bytes but those of the stored shapes."""

    def __init__(
        self, of: tuple[int, int] = (16, 64), /, **specs: tuple[str, tuple[int, ...] | None]
    ) -> None:
        found = {"packed": ("I32", (16, 8)), "scale": ("BF16", (16, 2)), "shape": ("I64", (2,))} | specs
        self.stored_shape = of
        self.specs = {
            f"a.weight_{part}": TensorSpec(f"a.weight_{part}", DType[dtype], dims)
            for part, (dtype, dims) in found.items()
            if dims is not None
        }

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        return np.array(self.stored_shape, "<i8").reshape(2, 1)


def config_of(bits: object = 4, **more: object) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits}, "targets": ["Linear"], "format": "pack-quantized"}
    return {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": group}} | more
    }


def test_forms_are_read_from_shapes() -> None:
    assert bind(Headers(), {})["a.weight"].encoding == AffineInt(4, 32, True, DType.BF16)
    asym = Headers(zero_point=("I32", (2, 2)))
    assert bind(asym, config_of())["a.weight"].encoding == AffineInt(4, 32, False, DType.BF16)
    channel = Headers(scale=("F16", (16, 1)))
    assert bind(channel, config_of())["a.weight"].encoding == AffineInt(4, None, True, DType.F16)


def test_the_config_decides_between_bits_that_fill_the_same_words() -> None:
    narrow = Headers((16, 18), packed=("I32", (16, 4)), scale=("F32", (16, 1)))
    for bits in (6, 7):
        assert bind(narrow, config_of(bits))["a.weight"].encoding == AffineInt(bits, None, True, DType.F32)
    with pytest.raises(CorruptCheckpoint, match=r"a\.weight_packed: \[16, 4\] holds 6 or 7 bits"):
        bind(narrow, {})


@pytest.mark.parametrize(
    ("headers", "fact"),
    [
        (Headers(scale=("BF16", None)), "a.weight_scale: missing"),
        (Headers(packed=("I32", None)), "a.weight_packed: missing"),
        (Headers(shape=("I64", None)), "a.weight_shape: missing"),
        (Headers(shape=("I32", (2,))), "a.weight_shape: i32 [2], but a.weight_packed is there"),
        (Headers(shape=("I64", (3,))), "a.weight_shape: i64 [3], but int4-g32 of shape [16, 64]"),
        (Headers(shape=("I64", (4,))), "a.weight_shape: not two int64"),
        (Headers((16, 63)), "a.weight_scale: bf16 [16, 2]"),
        (Headers((16, 1 << 60)), "a.weight_packed: [16, 8] holds no number of bits"),
        (Headers((-16, 64)), "a.weight_packed: [16, 8] holds no number of bits"),
        (Headers((0, 0)), "a.weight_packed: "),
        (Headers(packed=("I32", (16, 9))), "a.weight_packed: [16, 9] holds no number of bits"),
        (Headers(packed=("I64", (16, 8))), "a.weight_packed: i64 [16, 8]"),
        (Headers(packed=("I32", (16, 8, 1))), "a.weight_packed: "),
        (Headers(scale=("BF16", (2, 16))), "a.weight_scale: bf16 [2, 16]"),
        (Headers(scale=("BF16", (16, 0))), "a.weight_scale: bf16 [16, 0]"),
        (Headers(scale=("BF16", (16,))), "a.weight_scale: bf16 [16]"),
        (Headers(scale=("I8", (16, 2))), "a.weight_scale: i8 [16, 2]"),
        (Headers(zero_point=("I32", (16, 2))), "a.weight_zero_point: i32 [16, 2]"),
        (Headers(zero_point=("I8", (2, 2))), "a.weight_zero_point: i8 [2, 2]"),
        (Headers(g_idx=("I32", (64,))), "a.weight_g_idx: "),
        (
            Headers(packed=("I32", (16, 16))),
            "a.weight_packed: holds 8-bit codes, config.json says num_bits [4]",
        ),
    ],
)
def test_arrays_that_do_not_belong_together_are_named(headers: Headers, fact: str) -> None:
    with pytest.raises(QConvertError) as caught:
        bind(headers, config_of())
    assert caught.value.fact.startswith(fact)


@pytest.mark.parametrize("dtype", ["I64", "I8", "U8", "F8_E4M3"])
def test_scales_of_float8_weights_are_floats(dtype: str) -> None:
    headers = Headers(packed=("I32", None), shape=("I64", None), scale=(dtype, (16, 1)))
    headers.specs["a.weight"] = TensorSpec("a.weight", DType.F8_E4M3, (16, 64))
    with pytest.raises(CorruptCheckpoint, match=rf"a\.weight_scale: .*, not {dtype.lower()}"):
        bind(headers, config_of())


def test_a_weight_stored_twice_is_refused() -> None:
    headers = Headers()
    headers.specs["a.weight"] = TensorSpec("a.weight", DType.BF16, (16, 64))
    with pytest.raises(CorruptCheckpoint, match=r"a\.weight: stored both"):
        bind(headers, config_of())


@pytest.mark.parametrize(
    "quantization",
    [
        {"format": "marlin-24"},
        {"format": ["pack-quantized"]},
        {"config_groups": {"g": {"format": "naive-quantized"}}},
        {"config_groups": {"g": {"input_activations": {"num_bits": 6}}}},
        {"transform_config": {"config_groups": {"r": 1}}},
    ],
)
def test_what_would_be_lost_by_rewriting_is_not_read(quantization: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=r"^config\.json: "):
        bind(Headers(), {"quantization_config": quantization})


@pytest.mark.parametrize(
    "groups", [None, [], 3, {"g": None}, {"g": {"weights": [4]}}, {"g": {"weights": {"num_bits": "4"}}}]
)
def test_a_config_that_says_nothing_about_bits_leaves_it_to_the_shapes(groups: object) -> None:
    assert (
        bind(Headers(), {"quantization_config": {"config_groups": groups}})["a.weight"].encoding.label
        == "int4-g32"
    )


def test_a_config_without_any_quantized_weight_is_refused() -> None:
    headers = Headers()
    headers.specs = {"x.q_proj.weight": TensorSpec("x.q_proj.weight", DType.BF16, (4, 4))}
    with pytest.raises(CorruptCheckpoint, match=r"^x\.q_proj: no weight_packed"):
        bind(headers, config_of())


# What is written into config.json.

INT4 = AffineInt(4, 128, symmetric=True, scale_dtype=DType.BF16)
INT8 = AffineInt(8, None, symmetric=False, scale_dtype=DType.BF16)


def test_one_form_for_all_linears_is_one_group_of_a_class() -> None:
    config = quantization_config({"model.layers.0.a": INT4, "model.layers.1.a": INT4}, ["lm_head"])
    group = config["config_groups"]["group_0"]
    assert group["targets"] == ["Linear"] and config["ignore"] == ["lm_head"]
    weights = group["weights"]
    assert (weights["num_bits"], weights["strategy"], weights["group_size"]) == (4, "group", 128)
    assert weights["symmetric"] is True and "zp_dtype" not in weights


def test_several_forms_are_groups_that_match_exactly_their_modules() -> None:
    encodings = {
        f"model.layers.{i}.mlp.{m}": INT8 if (i + len(m)) % 2 else INT4
        for i in range(12)
        for m in ("up", "down")
    }
    config = quantization_config(encodings, [])
    matched: dict[str, list[str]] = {name: [] for name in encodings}
    for group in config["config_groups"].values():
        for target in group["targets"]:
            for name in encodings:
                if re.match(target.removeprefix("re:"), name):
                    matched[name].append(f"int{group['weights']['num_bits']}")
    assert matched == {name: [f"int{encoding.bits}"] for name, encoding in encodings.items()}


def test_patterns_escape_dots_and_match_nothing_longer() -> None:
    (pattern,) = patterns(["model.layers.1.a.b", "model.layers.10.a.b"])
    body = pattern.removeprefix("re:")
    assert re.match(body, "model.layers.10.a.b")
    for other in (
        "model.layers.100.a.b",
        "modelxlayers.1.a.b",
        "model.layers.1.a.bc",
        "x.model.layers.1.a.b",
    ):
        assert not re.match(body, other)


class HeadersAlone(LocalBytes):
    has_bytes = False


def test_headers_alone_tell_the_forms(model: Path, tmp_path: Path) -> None:
    quantized = open_checkpoint(made("quantize", model, "--bits", "4", "-o", tmp_path / "out"))
    folder = tmp_path / "headers"
    folder.mkdir()
    (folder / "config.json").write_text((tmp_path / "out" / "config.json").read_text())
    source = HeadersAlone(next((tmp_path / "out").glob("*.safetensors")))
    seen = open_checkpoint(folder, {"model.safetensors": source})
    assert seen.tensors == quantized.tensors
    assert not seen.files.has_weights


def test_the_only_block_of_a_weight_is_one(tmp_path: Path) -> None:
    """One number may be the scale of a tensor, of its only row or its only block: the config says which."""
    from tests.layouts.foreign_layouts import SIZES

    plain = tiny(tmp_path / "m", "qwen3", **SIZES)
    out = made("convert", plain, "--to", "compressed-tensors", "--scheme", "fp8-block", "-o", tmp_path / "q")
    assert open_checkpoint(out).quantization == "compressed-tensors (e4m3-g128x128)"
    back = made("convert", out, "--to", "fp8", "-o", tmp_path / "fp8")
    kinds = json.loads((back / "qconvert.json").read_text())["tensors"].values()
    assert {entry["certificate"]["kind"] for entry in kinds} == {"exact"}
    whole = made(
        "convert", plain, "--to", "compressed-tensors", "--scheme", "fp8-tensor", "-o", tmp_path / "t"
    )
    assert open_checkpoint(whole).quantization == "compressed-tensors (e4m3-tensor)"
