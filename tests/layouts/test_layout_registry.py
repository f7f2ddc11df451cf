"""Holds that a layout is one file and one line: traits agree with rules, and a toy is a layout too."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, ModelTensor, Quantized
from qconvert.core.schemes import Scheme, parse_scheme
from qconvert.core.values import AffineIntRows, DenseRows
from qconvert.errors import BadRecipe
from qconvert.formats.layouts import registry
from qconvert.formats.layouts.base import RegisteredLayout
from qconvert.formats.layouts.hqq import _META, _SETTINGS
from qconvert.models.parameter_table import form_bytes
from qconvert.ops.rows import Op
from qconvert.plan.passes.transcode import check_integers
from qconvert.quant.packed_codes import codes_of
from tests import pairs
from tests.support.commands import made, qconvert
from tests.support.models import stored, tiny

DOWN = "model.layers.1.mlp.down_proj"
SHAPE = (256, 384)
SCHEMES = [Scheme(*each) for each in product(range(2, 9), (None, 32, 96, 128), (True, False))]
HQQ_BESIDE = tuple(f"x.{key}" for key in (*_SETTINGS, *_META))
# Arrays of a few bytes that sizes leave out.
SMALL = ("_shape", ".weight_format", ".quant_map", "bitsandbytes__nf4", "bitsandbytes__fp4", *HQQ_BESIDE)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """The one line that makes a layout known."""
    monkeypatch.setitem(registry.WRITTEN, "toy", "tests.support.toy_layout")
    return "toy"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model") / "m", "qwen3", dtype="f32")


def outcome(layout: RegisteredLayout, encoding: Quantized, shape: tuple[int, ...]) -> Quantized:
    """The encoding that a rule makes of one."""
    assert layout.transcode is not None
    ops: tuple[Op, ...] = layout.transcode(ModelTensor("x.weight", shape, encoding), encoding)
    made_ = encoding
    for op in ops:
        after = op.infer(made_)
        assert isinstance(after, Quantized)
        made_ = after
    return made_


def nbytes(layout: RegisteredLayout, encoding: Quantized, shape: tuple[int, ...]) -> int:
    """The bytes of the arrays that the layout writes."""
    assert layout.writer is not None
    specs = layout.writer().stored_arrays(ModelTensor("x.weight", shape, encoding))
    return sum(spec.nbytes for spec in specs if not spec.name.endswith(SMALL))


@pytest.mark.parametrize("name", registry.written())
def test_a_layout_stores_the_integers_that_its_traits_say_and_no_others(name: str) -> None:
    layout = registry.find(name)
    taken = 0
    for scheme in SCHEMES:
        encoding = scheme.encoding(DType.F16)
        if layout.traits.integers is not None and layout.traits.integers.accepts(scheme):
            check_integers(name, scheme)
            after = outcome(layout, encoding, SHAPE)
            assert nbytes(layout, after, SHAPE) == form_bytes(after, SHAPE, layout.traits), scheme.label
            if isinstance(after, AffineInt) and layout.traits.scale_dtype:
                assert after.scale_dtype is layout.traits.scale_dtype
            taken += 1
            continue
        with pytest.raises(BadRecipe) as asked:
            check_integers(name, scheme)
        hint = str(asked.value.hint)
        assert f"{name} does not hold it" in asked.value.fact and "it holds " in hint
        _, _, others = hint.partition(f"; {scheme.label} is held by ")
        assert others == ", ".join(registry.with_integers(scheme)) and name not in others.split(", ")
        for other in filter(None, others.split(", ")):
            check_integers(other, scheme)
        with pytest.raises(BadRecipe) as kept:
            outcome(layout, encoding, SHAPE)
        assert "--allow-requantize" in str(kept.value.hint), scheme.label
    assert bool(taken) == (layout.traits.integers is not None)


@pytest.mark.parametrize("name", registry.written())
def test_a_layout_stores_the_codebooks_that_its_traits_say(name: str) -> None:
    layout = registry.find(name)
    shape = (3, 128, 128) if layout.traits.experts == "class" else (256, 256)
    for scheme, dtype in product(layout.traits.codebooks, (DType.BF16, DType.F32)):
        encoding = scheme.encoding(dtype)
        encoding = replace(encoding, second="nested") if scheme.nested else encoding
        assert outcome(layout, encoding, shape) == encoding
        known = form_bytes(encoding, shape, layout.traits)
        assert 0 <= nbytes(layout, encoding, shape) - known <= (0 if not encoding.second else 8192)
        assert layout.traits.codebook(scheme.name) is scheme


@pytest.mark.parametrize("name", registry.written())
def test_only_layouts_with_groups_of_columns_take_activation_order(name: str) -> None:
    layout = registry.find(name)
    integers = layout.traits.integers
    encoding = AffineInt(integers.bits[-1] if integers else 8, 128, True, DType.F16, act_order=True)
    if layout.traits.act_order:
        after = outcome(layout, encoding, SHAPE)
        assert isinstance(after, AffineInt) and after.act_order
    else:
        with pytest.raises(BadRecipe):
            outcome(layout, encoding, SHAPE)


@pytest.mark.parametrize("name", (*registry.written(), *registry.read_only()))
def test_what_is_said_of_a_layout_is_whole(name: str) -> None:
    layout = registry.find(name)
    traits = layout.traits
    written = layout.writer is not None
    assert written == (name in registry.written()) == (layout.transcode is not None)
    assert written or (traits.instead and layout.reader)
    assert bool(traits.described) == written
    assert set(traits.first_choice_of) <= set(traits.readers)
    if layout.writer is not None:
        assert layout.writer().traits.config_key == traits.config_key
    for limit in traits.limits:
        fields = {"loader": "L", "layout": name, "encoding": "E", "bits": 4}
        assert "{" not in limit.fact.format(**fields)


def test_no_file_but_those_of_layouts_names_a_layout() -> None:
    """MLX and compressed-tensors are libraries too: a loader, and a version that bug reports show; GPTQ and
    AWQ are methods. Two tables have the words of other tools, and what they mean here."""
    names = {*registry.written(), *registry.read_only()} - {"mlx", "awq"}
    root = Path(__file__).resolve().parents[2]
    said = {
        (path.relative_to(root).as_posix(), node.value)
        for path in [*(root / "qconvert").rglob("*.py"), *(root / "formats").rglob("*.py")]
        if "formats/layouts" not in path.relative_to(root).as_posix()
        and path.name not in ("scheme_names.py", "other_tools.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in names
    }
    assert said == {
        ("qconvert/cli/env.py", "compressed-tensors"),
        ("qconvert/calibrate/calibration.py", "gptq"),
    }


def test_every_loader_has_a_first_choice_that_it_reads() -> None:
    chosen = [loader for traits in registry.all_traits() for loader in traits.first_choice_of]
    assert sorted(chosen) == ["mlx", "sglang", "transformers", "vllm"]


def test_the_schemes_are_written_as_they_are_read() -> None:
    labels = {name: registry.traits_of(name).integers for name in registry.written()}
    assert labels["awq"] is not None and labels["awq"].label == "int4[-asym][-g{N}|-channel]"
    assert labels["mlx"] is not None and labels["mlx"].label == "int{2,3,4,5,6,8}[-asym]-g{32,64,128}"
    assert labels["int-quantized"] is not None and labels["int-quantized"].label == "int8[-asym]-channel"
    assert parse_scheme("int8-asym-channel") in SCHEMES


def test_a_toy_is_converted_into_and_out_of(toy: str, model: Path, tmp_path: Path) -> None:
    out = made("convert", model, "--to", toy, "--scheme", "int4-g64", "-o", tmp_path / "toy")
    arrays = stored(out)
    assert f"{DOWN}.codes" in arrays and f"{DOWN}.weight" not in arrays
    assert json.loads((out / "toy.json").read_text()) == {"quant_method": "toy", "bits": 4}
    assert "Nobody but qconvert reads this folder" in (out / "README.md").read_text()
    assert open_checkpoint(out).quantization == "toy (int4-g64)"
    back = made("convert", out, "--to", "gptq", "-o", tmp_path / "gptq")
    again = made("convert", back, "--to", toy, "-o", tmp_path / "again")
    codes = [codes_and_scales(folder) for folder in (out, again)]
    np.testing.assert_array_equal(codes[0][0], codes[1][0])
    assert np.array_equal(codes[0][1].astype(np.float16), codes[1][1])
    plain = made("convert", out, "--to", "f32", "-o", tmp_path / "plain")
    numbers = open_checkpoint(plain)
    value = numbers.reader.read(numbers.tensors[f"{DOWN}.weight"], 0, 256)
    assert isinstance(value, DenseRows)
    steps = np.repeat(codes[0][1], 64, axis=1)
    np.testing.assert_allclose(value.rows_RI, (codes[0][0].astype(np.float32) - 8) * steps, rtol=1e-6)


def codes_and_scales(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    checkpoint = open_checkpoint(folder)
    value = checkpoint.reader.read(checkpoint.tensors[f"{DOWN}.weight"], 0, 256)
    assert isinstance(value, AffineIntRows)
    return codes_of(value), value.scales_RG


def test_a_toy_refuses_what_its_traits_leave_out(toy: str, model: Path, tmp_path: Path) -> None:
    ran = qconvert("convert", model, "--to", toy, "--scheme", "int8-g64", "-o", tmp_path / "out")
    assert ran.code == 2 and "toy does not hold it" in ran.err and "it holds int{4,6}-g{32,64}" in ran.err
    ran = qconvert("convert", model, "--to", toy, "--scheme", "nf4", "-o", tmp_path / "out")
    assert ran.code == 2 and "it is for --to bitsandbytes" in ran.err
    other = made("convert", model, "--to", "compressed-tensors", "--scheme", "int5-g64", "-o", tmp_path / "o")
    ran = qconvert("convert", other, "--to", toy, "-o", tmp_path / "out")
    assert ran.code == 1 and "is not for toys" in ran.err and "--allow-requantize" in ran.err
    asked = ("convert", other, "--to", toy, "--allow-requantize", "-o", tmp_path / "out")
    assert qconvert(*asked).code == 0
    labels = {tensor.encoding.label for tensor in open_checkpoint(tmp_path / "out").tensors.values()}
    assert labels == {"f32", "int6-g64"}


def test_a_toy_is_linted(toy: str, model: Path, tmp_path: Path) -> None:
    for scheme, said in (("int4-g64", ""), ("int6-g64", "vllm is bored by int6-g64")):
        out = made("convert", model, "--to", toy, "--scheme", scheme, "-o", tmp_path / scheme)
        ran = qconvert("check", out, "--for", "vllm", "--json")
        errors = [p["fact"] for p in ran.json["problems"] if p["severity"] == "error"]
        assert errors == ([said] if said else [])
    ran = qconvert("check", out, "--for", "transformers")
    assert "transformers does not read toy weights" in ran.out + ran.err
    assert "`qconvert convert --to compressed-tensors`" in ran.out + ran.err


def test_a_toy_is_in_the_help_and_in_the_table_of_pairs(toy: str) -> None:
    assert f"  {toy}                 int{{4,6}}-g{{32,64}}\n" in qconvert("convert", "--help").out
    for words in (("convert", "x", "--to", "nothing"), ("quantize", "x", "--layout", "nothing")):
        ran = qconvert(*words)
        assert ran.code == 2 and "'toy'" in ran.err
    assert " | toy | " in pairs.head() and pairs.targets()["toy"] == "int4-g64"


def test_a_toy_is_gone_again(model: Path, tmp_path: Path) -> None:
    assert "toy" not in registry.written() and "toy" not in pairs.head()
    assert qconvert("convert", model, "--to", "toy", "-o", tmp_path / "out").code == 2
