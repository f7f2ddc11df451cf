"""Schemes as users write them: every spelling in, one canonical spelling out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.schemes import Scheme, parse_scheme
from qconvert.errors import BadRecipe

SCHEMES = st.builds(
    Scheme,
    bits=st.integers(2, 8),
    group_size=st.none() | st.integers(1, 1 << 20),
    symmetric=st.booleans(),
)


@given(SCHEMES)
def test_the_canonical_spelling_is_read_back(scheme: Scheme) -> None:
    assert parse_scheme(scheme.label) == scheme


@pytest.mark.parametrize(
    ("text", "scheme"),
    [
        ("int4", Scheme(4, 128)),
        ("int8-asym", Scheme(8, 128, symmetric=False)),
        ("int3-g32", Scheme(3, 32)),
        ("int2-asym-g64", Scheme(2, 64, symmetric=False)),
        ("int8-channel", Scheme(8, None)),
        ("int5-asym-channel", Scheme(5, None, symmetric=False)),
        ("keep", None),
        ("INT4", Scheme(4, 128)),
        ("Int8-Asym-Channel", Scheme(8, None, symmetric=False)),
    ],
)
def test_spellings(text: str, scheme: Scheme | None) -> None:
    assert parse_scheme(text) == scheme


@pytest.mark.parametrize("text", ["", "int", "bf16", "keep!", "int1", "int9", "int44", "int4-sym"])
@pytest.mark.parametrize("tail", ["", " ", "\n", "-g32"])
def test_what_is_no_scheme_is_none_with_a_tail_either(text: str, tail: str) -> None:
    with pytest.raises(BadRecipe):
        parse_scheme(text + tail)


@pytest.mark.parametrize(
    "text",
    [
        "int4-g0",
        "int4-g",
        "int4-g-1",
        "int4-g064",
        "int4 ",
        " int4",
        "int4\n",
        "int4-channel-g32",
        "int4-g32-asym",
    ],
)
def test_everything_else_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(BadRecipe, match="not a scheme") as caught:
        parse_scheme(text)
    assert "int{2..8}[-asym]-g{N}" in str(caught.value.hint)


def test_a_name_of_two_meanings_is_refused() -> None:
    with pytest.raises(BadRecipe) as caught:
        parse_scheme("INT8")
    assert "--scheme W8A8" in str(caught.value.hint) and parse_scheme("int8") == Scheme(8, 128)


def test_a_near_miss_is_guessed() -> None:
    with pytest.raises(BadRecipe) as caught:
        parse_scheme("int4-asymm-g32")
    assert "did you mean 'int4-asym-g32'?" in str(caught.value.hint)


@given(st.text(max_size=30))
def test_any_text_is_a_scheme_or_a_bad_recipe(text: str) -> None:
    try:
        scheme = parse_scheme(text)
    except BadRecipe:
        return
    assert text == "keep" if scheme is None else scheme.bits in range(2, 9)


def test_the_form_of_a_scheme_carries_the_dtype_of_its_scales() -> None:
    encoding = Scheme(4, 64, symmetric=False).encoding(DType.F16)
    assert encoding == AffineInt(4, 64, symmetric=False, scale_dtype=DType.F16)
    assert encoding.groups(256) == 4 and Scheme(4, None).encoding(DType.F16).groups(256) == 1


@pytest.mark.parametrize("name", ["W2A16", "W4A16", "W8A16", "W4A16_ASYM"])
def test_presets_of_llm_compressor_are_the_schemes_that_it_means(name: str) -> None:
    presets = pytest.importorskip("compressed_tensors.quantization.quant_scheme").PRESET_SCHEMES
    weights, scheme = presets[name]["weights"], parse_scheme(name)
    assert scheme is not None and presets[name].get("input_activations") is None
    assert (weights.num_bits, weights.group_size, weights.symmetric) == (
        scheme.bits, scheme.group_size, scheme.symmetric,
    )  # fmt: skip
