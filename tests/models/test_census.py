"""The table by role: exact counts from a config, from headers and from a plan, a tied head once."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Encoding, ModelTensor, Unquantized
from qconvert.formats.layouts.compressed_tensors import CompressedTensors
from qconvert.models import Architecture, bind
from qconvert.models.parameter_table import (
    ParameterTable,
    census_of_config,
    form_bytes,
    linear_bits,
    table_of_outputs,
    table_of_tensors,
)
from qconvert.report.tables import parameter_table_lines, size
from tests.support.models import HEAD, tiny_config, tiny_shapes

BF16 = Unquantized(DType.BF16)
INT4 = AffineInt(4, 64, symmetric=True, scale_dtype=DType.BF16)


def tensors_of(encoding: Encoding = BF16, *, head: bool = False, **config: Any) -> dict[str, ModelTensor]:
    shapes = tiny_shapes(tiny_config(**config))
    if head:
        shapes[HEAD] = (320, 256)
    return {n: ModelTensor(n, s, encoding if "_proj.weight" in n else BF16) for n, s in shapes.items()}


def census_of(encoding: Encoding = BF16, *, head: bool = False, **config: Any) -> ParameterTable:
    tensors = tensors_of(encoding, head=head, **config)
    return table_of_tensors(tensors, bind(Architecture.of(tiny_config(**config)), tensors))


def test_counts_agree_however_the_model_is_known() -> None:
    config = tiny_config("qwen2", tied=False)
    architecture = Architecture.of(config)
    total = sum(prod(shape) for shape in tiny_shapes(config).values())
    by_headers = census_of(family="qwen2", tied=False)
    assert by_headers == table_of_outputs(tensors_of(family="qwen2", tied=False), architecture)
    by_config = census_of_config(architecture)
    assert by_config.parameters == by_headers.parameters == total
    assert by_config.tensors == by_headers.tensors == len(tiny_shapes(config))
    assert (by_headers.nbytes, by_headers.bits_per_weight) == (2 * total, 16.0)
    assert (by_config.nbytes, by_config.rows[0].bits_per_weight) == (0, None)


def test_rows_follow_the_printed_structure_and_gather_small_tensors_at_the_end() -> None:
    roles = [row.role for row in census_of(family="qwen2", tied=False).rows]
    linears = ["attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down"]
    assert roles == ["embed", *linears, "lm_head", "norms", "biases"]


def test_one_row_in_numbers() -> None:
    row = next(row for row in census_of(INT4).rows if row.role == "mlp.down")
    assert (row.tensors, row.parameters, row.shapes, row.encodings) == (
        2,
        2 * 256 * 384,
        ((256, 384),),
        ("int4-g64",),
    )
    assert row.bits_per_weight == 4.25


def test_a_stored_head_of_a_tied_model_counts_once_but_takes_its_bytes() -> None:
    once, stored = census_of(), census_of(head=True)
    assert stored.parameters == once.parameters
    assert stored.tensors == once.tensors + 1
    assert stored.nbytes == once.nbytes + 2 * 320 * 256


def test_unknown_tensors_have_a_row() -> None:
    tensors = tensors_of() | {"x": ModelTensor("x", (), BF16), "y": ModelTensor("y", (0, 4), BF16)}
    binding = bind(Architecture.of(tiny_config()), tensors, allow_unknown=True)
    row = table_of_tensors(tensors, binding).rows[-1]
    assert (row.role, row.tensors, row.parameters) == ("unknown", 2, 1)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("group_size", [None, 32, 96])
@pytest.mark.parametrize("rows", [1, 7, 32, 33])
def test_bytes_are_those_of_the_layout_but_for_the_stored_shape(
    bits: int, symmetric: bool, group_size: int | None, rows: int
) -> None:
    encoding = AffineInt(bits, group_size, symmetric, DType.F16)
    specs = CompressedTensors().stored_arrays(ModelTensor("w.weight", (rows, 96), encoding))
    assert form_bytes(encoding, (rows, 96)) == sum(s.nbytes for s in specs if not s.name.endswith("_shape"))


def test_bits_of_the_linears_leave_head_embedding_and_norms_out() -> None:
    architecture = Architecture.of(tiny_config(tied=False))
    assert linear_bits(tensors_of(INT4, tied=False), architecture) == 4.25
    assert linear_bits(tensors_of(tied=False), architecture) == 16.0
    assert linear_bits({}, architecture) is None


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 KB"),
        (12_345, "12.3 KB"),
        (1.163e9, "1.16 GB"),
        (4e14, "400 TB"),
    ],
)
def test_sizes_have_three_digits(nbytes: float, text: str) -> None:
    assert size(nbytes) == text


def test_the_printed_table_aligns_and_ends_with_totals() -> None:
    lines = parameter_table_lines(census_of(INT4))
    assert lines[0].split() == ["role", "shape", "tensors", "parameters", "form", "bytes", "bpw"]
    assert lines[-1].split()[:3] == ["total", "24", f"{census_of().parameters:,}"]
    ends = {len(line) for line in lines}
    assert len(ends) == 1
    assert "bytes" not in parameter_table_lines(census_of_config(Architecture.of(tiny_config())))[0]
