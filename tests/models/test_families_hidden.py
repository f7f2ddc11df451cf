"""Every declared family under a model_type that nobody knows: the guess takes what the declaration does.

`QCONVERT_ZOO=all` also holds the guess against every causal language model of transformers (a minute).
"""

from __future__ import annotations

import json
import os
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.checkpoint.stored_shapes import output_major
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.models import Architecture, Binding, bind
from qconvert.models.guessed import guessed_family
from tests.models.test_families_classes import class_of
from tests.models.test_families_saved import saved
from tests.support.commands import qconvert
from tests.support.family_configs import SAVED
from tests.support.family_models import ALONE, RELATIVES, ROWS

BF16 = Unquantized(DType.BF16)
CONFIGS = {
    **{name: row.config for name, row in ROWS.items()},
    **{name: config for name, (config, _) in RELATIVES.items()},
    **{name: config for name, (config, *_) in ALONE.items()},
    **{name: row.config for name, row in SAVED.items()},
}
# Families whose structure does not say all: the rest is asked for with --allow-unknown.
OPEN = {"gpt-oss": "a stack of experts with biases of their own"}
# Shapes that were computed from the published configs of real models.
REAL = (
    "Qwen2-72B", "Qwen2.5-7B", "Qwen2.5-14B", "Qwen2.5-32B", "Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B",
)  # fmt: skip
# What transformers has classes for, beside the declared families, that is built in other ways.
OTHERS = (
    "afmoe", "bamba", "bloom", "codegen", "ctrl", "doge", "ernie4_5_moe", "falcon_mamba", "gpt_neox",
    "gptj", "granitemoehybrid", "jamba", "lfm2", "mamba", "minimax", "mpt", "nanochat", "opt",
    "persimmon", "phi", "recurrent_gemma", "stablelm", "starcoder2", "xglm",
)  # fmt: skip


def hidden(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "architectures"} | {"model_type": "hidden"}


def tensors_of(shapes: dict[str, tuple[int, ...]]) -> dict[str, ModelTensor]:
    return {name: ModelTensor(name, shape, BF16) for name, shape in shapes.items()}


def guess_of(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Binding:
    tensors = tensors_of(shapes)
    architecture = Architecture(guessed_family(hidden(config), tensors), hidden(config))
    return bind(architecture, output_major(tensors, architecture))


@cache
def stored_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """The arrays that the family's own class stores, or its declaration where transformers has no class."""
    if name in ROWS:
        return {n: tuple(t.shape) for n, t in class_of(name).state_dict().items()}
    if name in SAVED:
        return {n: tuple(t.shape) for n, t in saved(name).items()}
    architecture = Architecture.of(CONFIGS[name])
    return {n: architecture.stored_shapes.get(n, p.shape) for n, p in architecture.stored.items()}


def declared(name: str) -> Binding:
    tensors = tensors_of(stored_shapes(name))
    architecture = Architecture.of(CONFIGS[name]).spelled_like(tensors)
    return bind(architecture, output_major(tensors, architecture))


def linears(binding: Binding) -> set[str]:
    """What a recipe without rules quantizes."""
    return {
        name
        for name, parameter in binding.parameters.items()
        if parameter.kind == "linear" and parameter.param == "weight" and parameter.role != "lm_head"
    }


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_that_the_declaration_keeps_is_quantized(name: str) -> None:
    ours, theirs = guess_of(CONFIGS[name], stored_shapes(name)), declared(name)
    kinds = {n: theirs.parameters[n].kind for n in linears(ours) - linears(theirs) if n in theirs.parameters}
    assert kinds == {} and not linears(ours) & set(theirs.unknown)


@pytest.mark.parametrize("name", CONFIGS)
def test_matrices_are_turned_where_the_declaration_turns_them(name: str) -> None:
    ours, theirs = guess_of(CONFIGS[name], stored_shapes(name)), declared(name)
    both = linears(ours) & linears(theirs)
    assert {n: ours.parameters[n].shape for n in both} == {n: theirs.parameters[n].shape for n in both}


def test_nine_of_ten_families_are_quantized_as_their_declarations_say() -> None:
    differing = [
        n for n in CONFIGS if linears(guess_of(CONFIGS[n], stored_shapes(n))) != linears(declared(n))
    ]
    assert len(differing) <= len(CONFIGS) // 10, differing


@pytest.mark.parametrize("name", CONFIGS)
def test_what_needs_consent_is_known(name: str) -> None:
    found = guess_of(CONFIGS[name], stored_shapes(name)).architecture.family
    assert all(OPEN.get(name, "nothing") in reason for reason in found.open)
    assert "planned by its structure" in found.guess


@pytest.mark.parametrize("name", REAL)
def test_a_real_model_is_quantized_as_its_declaration_says(assets: Path, name: str) -> None:
    file = assets / "metadata" / "index-computed" / f"{name}.shapes.json"
    shapes = {n: tuple(shape) for n, shape in json.loads(file.read_text()).items()}
    layers = 1 + max(int(n.split(".")[2]) for n in shapes if ".layers." in n)
    config = {"vocab_size": 151_936, "num_hidden_layers": layers, "num_experts": 128}
    binding = guess_of(config, shapes)
    assert linears(binding) == {n for n in shapes if n.endswith("_proj.weight")}
    assert binding.architecture.family.open == ()


def test_towers_and_further_layers_of_a_real_model_are_kept(assets: Path) -> None:
    """Names of a published index with the shapes of its config, and as many layers of a tower as its own."""
    name = "Qwen3.5-25B-REAP-A3B"
    config = json.loads((assets / "metadata" / "configs" / f"{name}_config.json").read_text())
    index = json.loads((assets / "metadata" / "index" / f"{name}.model.safetensors.index.json").read_text())
    names = set(index["weight_map"])
    architecture = Architecture.of(config).spelled_like(names)
    places = {n: architecture.parameter(n) for n in names}
    carried = {f"model.visual.blocks.{n}.attn.qkv.weight": (3456, 1152) for n in range(40)}
    carried |= {f"mtp.layers.{n}.self_attn.q_proj.weight": (4096, 2048) for n in range(40)}
    shapes = {n: place.shape for n, place in places.items() if place} | carried
    declares = bind(architecture, tensors_of(shapes))
    ours = guess_of(config, shapes)
    assert linears(ours) == linears(declares) and ours.architecture.family.open == ()
    assert set(declares.unknown) == set(carried)


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "internlm2", "chatglm2", "qwen3"])
def test_the_guess_writes_the_bytes_of_the_declaration(assets: Path, tmp_path: Path, name: str) -> None:
    source = assets / "fixtures" / "zoo" / name
    other = tmp_path / "hidden"
    shutil.copytree(source, other, copy_function=shutil.copyfile)
    other.chmod(0o755)
    config = json.loads((source / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(hidden(config)))
    wish = ("--bits", 4, "--group-size", 32)
    for model, out in ((source, "known"), (other, "unknown")):
        ran = qconvert("quantize", model, *wish, "-o", tmp_path / out)
        assert ran.code == 0, ran.err
    assert "planned by its structure" in ran.err
    known, unknown = (open_checkpoint(tmp_path / out) for out in ("known", "unknown"))
    plain = {n for n in unknown.tensors if n not in known.tensors}
    assert plain == {n for n in plain if "inv_freq" in n}, "only a buffer that the family names is left out"
    if not plain:
        files = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("known", "unknown")]
        assert files[0] == files[1]
    ran = qconvert("dequantize", tmp_path / "unknown", "-o", tmp_path / "back")
    assert ran.code == 0, ran.err
    back, before = open_checkpoint(tmp_path / "back"), open_checkpoint(other)
    assert {n: t.shape for n, t in back.tensors.items()} == {n: t.shape for n, t in before.tensors.items()}
    ran = qconvert("convert", tmp_path / "unknown", "--to", "gptq", "-o", tmp_path / "gptq")
    assert ran.code == 0, ran.err


def zoo() -> tuple[str, ...]:
    if os.environ.get("QCONVERT_ZOO") != "all":
        return OTHERS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("model_type", zoo())
def test_only_linears_of_a_class_are_taken_for_linears(model_type: str) -> None:
    """Never a norm, a convolution, an embedding; nor a Linear that the class calls a router."""
    import torch
    import transformers

    config = transformers.CONFIG_MAPPING[model_type]()
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, min(4, getattr(config, key)))
    try:
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config)
    except Exception as error:
        if model_type in OTHERS:
            raise
        pytest.skip(f"transformers makes no model of the class's own defaults: {error}")
    shapes = {n: tuple(p.shape) for n, p in model.state_dict().items() if p.numel()}
    kinds = (torch.nn.Linear, transformers.pytorch_utils.Conv1D)
    modules = {f"{n}.weight" for n, module in model.named_modules() if isinstance(module, kinds)}
    stacks = {n for n, parameter in model.named_parameters() if parameter.dim() == 3 and "expert" in n}
    found = linears(guess_of(config.to_dict(), shapes))
    taken = found - {n for n in found if "router" in n or n.endswith(".gate.weight")}
    assert found == taken and found <= modules | stacks
