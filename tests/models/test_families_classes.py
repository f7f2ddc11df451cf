"""Every family against the class it describes: names, shapes, counts, linears, ways to fuse."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from qconvert.checkpoint.stored_shapes import output_major
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import CorruptCheckpoint
from qconvert.models import Architecture, Binding, bind
from qconvert.models.parameter_table import census_of_config, table_of_tensors
from tests.support.family_models import ALONE, RELATIVES, ROWS

BF16 = Unquantized(DType.BF16)


@cache
def class_of(row: str) -> Any:
    """The class's own model of the row's config, without memory for its weights."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**ROWS[row].config)
    with torch.device("meta"):
        made = getattr(transformers, ROWS[row].auto)
        return made.from_config(config) if made.__name__.startswith("Auto") else made(config)


def bound(row: str) -> Binding:
    tensors = {n: ModelTensor(n, tuple(t.shape), BF16) for n, t in class_of(row).state_dict().items()}
    architecture = Architecture.of(ROWS[row].config)
    return bind(architecture, output_major(tensors, architecture))


@pytest.mark.parametrize("row", ROWS)
def test_every_tensor_of_the_class_has_its_place_and_shape(row: str) -> None:
    """What is left out are second names that the class has for one weight."""
    binding, model = bound(row), class_of(row)
    assert binding.unknown == ()
    assert not set(binding.dropped) & {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("row", ROWS)
def test_counts_are_those_of_the_class_from_config_and_from_names(row: str) -> None:
    model = class_of(row)
    named = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    buffers = sum(t.numel() for n, t in model.state_dict().items() if n not in named)
    count = sum(p.numel() for p in model.parameters()) + buffers
    binding = bound(row)
    assert census_of_config(Architecture.of(ROWS[row].config)).parameters == count
    assert table_of_tensors(binding.tensors, binding).parameters == count


@pytest.mark.parametrize("row", ROWS)
def test_linears_are_those_of_the_class(row: str) -> None:
    """A linear is a Linear or Conv1D of the class, or a stack of them, that is no gate and no head."""
    import torch
    import transformers

    linear = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    model = class_of(row)
    modules = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, linear)}
    modules |= {n for n, p in model.named_parameters() if p.dim() == 3 and "experts" in n}
    gates = [re.compile(rf"(.*\.)?{gate}\.weight") for gate in ROWS[row].gates]
    binding = bound(row)
    heads = {n for n, p in binding.parameters.items() if p.role == "lm_head"}
    expected = {n for n in modules - heads if not any(gate.fullmatch(n) for gate in gates)}
    found = {n for n, p in binding.parameters.items() if p.kind == "linear" and p.param == "weight"}
    assert found - heads == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_experts", 1 << 32), ("num_experts", 0), ("mlp_only_layers", [1] * 5000), ("mlp_only_layers", 3)],
)
def test_a_config_that_would_never_end_is_refused_at_once(key: str, value: object) -> None:
    import time

    started = time.process_time()
    with pytest.raises(CorruptCheckpoint, match=r"^config\.json: "):
        census_of_config(Architecture.of(ROWS["qwen2-moe"].config | {key: value}))
    assert time.process_time() - started < 1


@pytest.mark.parametrize("name", RELATIVES)
def test_a_family_without_a_class_counts_like_its_relative(name: str) -> None:
    import torch
    import transformers

    ours, theirs = RELATIVES[name]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**theirs))
    assert census_of_config(Architecture.of(ours)).parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", ALONE)
def test_a_family_without_a_relative_has_its_count_and_its_linears(name: str) -> None:
    config, count, linears = ALONE[name]
    architecture = Architecture.of(config)
    found = {
        parameter.module.rsplit(".", 1)[1]
        for parameter in architecture.stored.values()
        if parameter.kind == "linear" and parameter.param == "weight" and parameter.layer is not None
    }
    assert census_of_config(architecture).parameters == count
    assert found == set(linears.split())
