"""Families whose files hold other names than their class in memory: what `save_pretrained` writes is bound.

transformers' conversion of names is run backwards on every model, as saving does.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qconvert.checkpoint.stored_shapes import output_major
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.models import Architecture, Binding, bind
from qconvert.models.parameter_table import census_of_config, table_of_tensors
from tests.support.commands import made
from tests.support.family_configs import SAVED

BF16 = Unquantized(DType.BF16)


@cache
def model_of(row: str) -> Any:
    """The class's own model with a 1 in every element of a linear, or of a stack of them, and 0 elsewhere."""
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**SAVED[row].config)
    auto = getattr(transformers, SAVED[row].auto)
    model = auto.from_config(config) if auto.__name__.startswith("Auto") else auto(config)
    linear = {m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)}
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            stacked = tensor.dim() == 3 and ".experts." in name
            tensor.fill_(tensor in linear or stacked)
    return model


@cache
def saved(row: str) -> dict[str, Any]:
    """The tensors under the names that saving gives them, a tied head left out."""
    from transformers.core_model_loading import revert_weight_conversion

    model = model_of(row)
    tied = model.config.tie_word_embeddings and any("lm_head" in k for k in (model._tied_weights_keys or ()))
    state = {n: t for n, t in model.state_dict().items() if not (tied and n == "lm_head.weight")}
    found = {}
    for saved_name, tensor in revert_weight_conversion(model, state).items():
        name = saved_name
        for pattern, text in SAVED[row].published:
            name = re.sub(pattern, text, name)
        found[name] = tensor
    return found


def bound(row: str) -> Binding:
    tensors = {n: ModelTensor(n, tuple(t.shape), BF16) for n, t in saved(row).items()}
    architecture = Architecture.of(SAVED[row].config).spelled_like(tensors)
    return bind(architecture, output_major(tensors, architecture))


@pytest.mark.parametrize("row", SAVED)
def test_every_saved_tensor_has_its_place_and_shape(row: str) -> None:
    """What has no place belongs to the vision tower, and is carried along by name."""
    binding = bound(row)
    assert binding.dropped == ()
    outside = [name for name in binding.unknown if binding.architecture.carries(name) != "vision"]
    assert outside == [] and bool(binding.unknown) == ("vision_config" in SAVED[row].config)


@pytest.mark.parametrize("row", SAVED)
def test_counts_are_those_of_the_class(row: str) -> None:
    binding = bound(row)
    count = sum(t.numel() for t in saved(row).values())
    outside = sum(t.numel() for n, t in saved(row).items() if n in binding.unknown)
    architecture = Architecture.of(SAVED[row].config)
    seen = outside if architecture.tower is not None else 0
    assert census_of_config(architecture).parameters == count - outside + seen
    assert table_of_tensors(binding.tensors, binding).parameters == count


def test_published_stacks_are_stored_the_other_way_round() -> None:
    """[experts, in, out], as Llama 4 saves them; transformers 5 saves Qwen3-VL-MoE's as it holds them."""
    for row, ours in (("qwen3-vl-moe", True), ("llama4", False)):
        turned = {n: t.transpose(1, 2) if t.dim() == 3 and ours else t for n, t in saved(row).items()}
        shapes = {n: ModelTensor(n, tuple(t.shape), BF16) for n, t in turned.items()}
        architecture = Architecture.of(SAVED[row].config).spelled_like(shapes)
        stacks = {n: s for n, s in architecture.stored_shapes.items() if "experts" in n}
        assert stacks and all(shapes[n].shape == s for n, s in stacks.items() if n in shapes)
        assert (
            bind(architecture, output_major(shapes, architecture)).parameters.keys()
            >= stacks.keys() & shapes.keys()
        )


@pytest.mark.parametrize("row", SAVED)
def test_linears_are_those_of_the_class(row: str) -> None:
    binding = bound(row)
    gates = [re.compile(rf"(.*\.)?{gate}\.weight") for gate in SAVED[row].kept]
    heads = {n for n, p in binding.parameters.items() if p.role in ("embed", "lm_head")}
    ones = {n for n, t in saved(row).items() if n not in binding.unknown and bool((t == 1).all())}
    expected = {n for n in ones - heads if not any(gate.fullmatch(n) for gate in gates)}
    found = {n for n, p in binding.parameters.items() if p.kind == "linear" and p.param == "weight"}
    assert found - heads == expected


# Models whose experts are stacked, one per file, in a space of their own, or beside a tower.
WHOLE = [
    "granite4",
    "granite-moe-shared",
    "ernie4.5-moe",
    "phi3.5-moe",
    "qwen3-vl-moe",
    "llama4",
    "minimax-m3",
    "step-3.7",
    "nemotron-3",
    "gemma4-moe",
    "starcoder",
]


@pytest.mark.parametrize("row", WHOLE)
def test_quantized_and_back_by_the_command(row: str, tmp_path: Path) -> None:
    """Linears come back within half a step of 8 bits, everything else bit for bit."""
    import torch
    from safetensors.torch import load_file, save_file

    torch.manual_seed(0)
    made_here = {
        n: t.new_empty(t.shape).normal_() if t.is_floating_point() else t for n, t in saved(row).items()
    }
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(SAVED[row].config))
    save_file(
        {n: t.contiguous() for n, t in made_here.items()},
        tmp_path / "m" / "model.safetensors",
        {"format": "pt"},
    )
    quantized = made(
        "quantize", tmp_path / "m", "--scheme", "int8-channel", "--min-max", "-o", tmp_path / "q"
    )
    back = load_file(
        made("dequantize", quantized, "--dtype", "f32", "-o", tmp_path / "d") / "model.safetensors"
    )
    linears = {n for n, p in bound(row).parameters.items() if p.kind == "linear" and p.role != "lm_head"}
    for name in made_here.keys() - linears:
        assert torch.equal(back[name], made_here[name]), name
    stacks = {n for n in linears if made_here[n].dim() == 3}
    for name in linears - stacks:
        step = made_here[name].abs().amax(1, keepdim=True) / 127
        assert bool(((back[name] - made_here[name]).abs() <= 0.51 * step).all()), name
    apart = sum(made_here[n].numel() for n in stacks)
    assert sum(t.numel() for n, t in back.items() if n not in made_here) == apart
