"""A model that is not in the catalogue: planned by its structure, with consent where that leaves something
open, or declared in a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import BadRecipe
from qconvert.models.guessed import guessed_family
from qconvert.plan.recipe import Recipe, parse_recipe
from tests.support.commands import qconvert
from tests.support.models import byte_tokenizer, tiny_arrays, tiny_config, write_file

RENAMES = {"self_attn.": "attention.", "model.embed_tokens": "model.tokens", "mlp.": "ff."}
RECIPE = """
scheme: int4-g64
architecture:
  like: llama
  rename: {self_attn.: attention., model.embed_tokens: model.tokens, mlp.: ff.}
  keys: {hidden_size: width}
  slots:
    - {role: attn.gain, module: "model.layers.{layer}.attention.gain", shape: [head_dim, 40], kind: other}
"""


def strange_model(folder: Path, *, gain: bool = True) -> Path:
    """A Llama under other names, with one config key of its own and one matrix more in each layer."""
    config = tiny_config("llama", tied=False)
    arrays = tiny_arrays(config)
    for ours, theirs in RENAMES.items():
        arrays = {name.replace(ours, theirs, 1): array for name, array in arrays.items()}
    for layer in range(2 if gain else 0):
        arrays[f"model.layers.{layer}.attention.gain.weight"] = np.ones((64, 40), np.float32)
    config |= {
        "model_type": "strange",
        "architectures": ["StrangeForCausalLM"],
        "width": config.pop("hidden_size"),
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    write_file(folder / "model.safetensors", arrays)
    return folder


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    return strange_model(tmp_path / "strange")


def test_inspect_shows_it_and_says_what_is_guessed(strange: Path) -> None:
    result = qconvert("inspect", strange, "--json")
    found = result.json
    count = sum(t.count for t in open_checkpoint(strange).tensors.values())
    assert result.code == 0 and found["parameters"] == count
    assert any("not in the catalogue" in warning for warning in found["warnings"])
    assert {"model.layers.attention.q_proj", "embed"} <= {row["role"] for row in found["rows"]}


def test_what_the_structure_leaves_open_is_refused_with_a_way_to_declare_it(strange: Path) -> None:
    for command in (
        ("quantize", "--bits", 4),
        ("dequantize",),
        ("convert", "--to", "gptq", "--scheme", "int4"),
    ):
        result = qconvert(command[0], strange, *command[1:], "-o", strange.parent / "out")
        assert result.code == 1
        assert "model_type 'strange' is not known here" in result.err
        assert "attention.gain [64, 40]: neither its name nor its shape" in result.err
        assert "architecture: {like: llama" in result.err and "--allow-unknown" in result.err


def packed(folder: Path) -> set[str]:
    tensors = open_checkpoint(folder).tensors
    return {name for name, tensor in tensors.items() if not isinstance(tensor.encoding, Unquantized)}


def test_with_consent_what_is_open_is_kept(strange: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    wish = ("--bits", 4, "--group-size", 64, "-o", out)
    result = qconvert("quantize", strange, *wish, "--allow-unknown")
    assert result.code == 0, result.err
    assert "linears are attention." in result.err and "open: attention.gain" in result.err
    assert len(packed(out)) == 2 * 7
    assert all((".attention." in name or ".ff." in name) and "gain" not in name for name in packed(out))


def test_an_unambiguous_model_needs_no_flag_and_the_account_is_printed(tmp_path: Path) -> None:
    model, out = strange_model(tmp_path / "plain", gain=False), tmp_path / "out"
    result = qconvert("quantize", model, "--bits", 4, "--group-size", 64, "-o", out)
    assert result.code == 0, result.err
    assert (
        "model_type 'strange' is not in the catalogue, and is planned by its structure: 2 layers"
        in result.err
    )
    assert "model.tokens holds the tokens, lm_head is the head" in result.err
    assert len(packed(out)) == 2 * 7
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    assert "planned by its structure" in " ".join(json.loads((out / "qconvert.json").read_text())["warnings"])
    for loader in ("transformers", "vllm", "sglang", "mlx"):
        assert qconvert("check", out, "--for", loader).code in (0, 3)
    for command in (("dequantize",), ("convert", "--to", "gptq")):
        result = qconvert(command[0], out, *command[1:], "-o", tmp_path / command[0])
        assert result.code == 0 and "planned by its structure" in result.err, result.err


def test_linears_that_share_an_input_are_fused_and_get_one_scheme(tmp_path: Path) -> None:
    model, out = strange_model(tmp_path / "plain", gain=False), tmp_path / "out"
    split = ("--rule", "re:q_proj=int8", "--bits", 4, "--group-size", 64, "-o", out)
    result = qconvert("quantize", model, *split)
    assert result.code == 1 and "q_proj" in result.err and not out.exists()
    assert qconvert("fuse", model, "-o", out).code == 0
    names = set(open_checkpoint(out).tensors)
    assert {"model.layers.1.attention.qkv_proj.weight", "model.layers.0.ff.gate_up_proj.weight"} <= names


def test_a_config_that_counts_no_layers_leaves_that_open(tmp_path: Path) -> None:
    model = strange_model(tmp_path / "plain", gain=False)
    config = json.loads((model / "config.json").read_text())
    del config["num_hidden_layers"]
    (model / "config.json").write_text(json.dumps(config))
    wish = ("--bits", 4, "--group-size", 64, "-o", tmp_path / "out")
    result = qconvert("quantize", model, *wish)
    assert result.code == 1 and "config.json does not say that there are 2 layers" in result.err
    assert qconvert("quantize", model, *wish, "--allow-unknown").code == 0
    assert len(packed(tmp_path / "out")) == 2 * 7


def test_a_tied_head_that_is_not_stored_is_told_to_loaders(tmp_path: Path) -> None:
    model, out = strange_model(tmp_path / "plain", gain=False), tmp_path / "out"
    config = json.loads((model / "config.json").read_text()) | {"tie_word_embeddings": True}
    (model / "config.json").write_text(json.dumps(config))
    result = qconvert("tie", model, "-o", tmp_path / "tied")
    assert result.code == 1 and "lm_head.weight: differs from model.tokens.weight" in result.err
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    result = qconvert(
        "quantize", model, "--bits", 4, "--group-size", 64, "--rule", "lm_head=int8-g64", "-o", out
    )
    assert result.code == 0, result.err
    assert packed(out) >= {"lm_head.weight"} and len(packed(out)) == 2 * 7 + 1


def test_a_declared_model_is_quantized_like_its_relative(strange: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(RECIPE)
    result = qconvert("quantize", strange, "--recipe", recipe, "-o", out)
    assert result.code == 0, result.err
    packed = {n for n, t in open_checkpoint(out).tensors.items() if not isinstance(t.encoding, Unquantized)}
    assert len(packed) == 2 * 7
    assert json.loads((out / "qconvert.json").read_text())["recipe"]["architecture"]["like"] == "llama"


def test_a_declaration_fuses_under_the_names_it_gives(strange: Path, tmp_path: Path) -> None:
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out"
    recipe.write_text(RECIPE + "fuse: [qkv]\n")
    result = qconvert("quantize", strange, "--recipe", recipe, "-o", out)
    assert result.code == 0, result.err
    assert "model.layers.1.attention.qkv_proj.weight" in open_checkpoint(out).tensors


def test_a_declaration_survives_the_manifest() -> None:
    import yaml

    recipe = parse_recipe(yaml.safe_load(RECIPE), "x")
    assert recipe.architecture is not None
    assert parse_recipe(json.loads(json.dumps(recipe.to_json())), "x") == recipe
    assert Recipe().to_json().keys() == recipe.to_json().keys() - {"architecture"}


@pytest.mark.parametrize(
    ("section", "hint"),
    [
        ({"like": "lama"}, "'llama'"),
        ({"rename": {}}, "like:"),
        ({"like": "llama", "renames": {}}, "'rename'"),
        ({"like": "llama", "without": ["mlp.nrom"]}, "'mlp.norm'"),
        ({"like": "llama", "slots": [{"role": "x", "module": "x"}]}, "shape"),
        ({"like": "llama", "slots": [{"role": "x", "module": "{x}.y", "shape": ["hidden"]}]}, "{layer}"),
        ({"like": "llama", "slots": [{"role": "x", "module": "y", "shape": ["hiden"]}]}, "'hidden'"),
        (
            {"like": "llama", "slots": [{"role": "x", "module": "y", "shape": ["hidden"], "kind": "big"}]},
            "linear",
        ),
    ],
)
def test_a_misspelt_declaration_names_the_nearest_word(section: object, hint: str) -> None:
    with pytest.raises(BadRecipe) as caught:
        declared = parse_recipe({"architecture": section}, "r.yaml").architecture
        assert declared is not None
        declared.architecture(tiny_config("llama"))
    assert "architecture" in caught.value.fact and hint in str(caught.value.hint)


MATRICES = {
    "h.0.attn.wq.weight": True,
    "h.0.mlp.gate_proj.weight": True,
    "h.0.mlp.experts.3.up.weight": True,
    "h.0.attn.unheard_of.weight": True,  # for both of its sizes are the residual's
    "h.0.conv.in_proj.weight": True,
    "h.0.mlp.gate.weight": False,
    "h.0.ln1.weight": False,
    "h.0.router.weight": False,
    "h.0.attn.bias": False,
    "h.0.q_norm.weight": False,
    "h.0.rel_pos_embed.weight": False,
    "h.0.mixer.A_log": False,
    "h.0.linear_attn.in_proj_b.weight": False,
    "h.0.conv.conv.weight": False,
    "h.0.attn.compressor.wkv.weight": False,
    "visual.blocks.0.attn.q_proj.weight": False,
    "altup_projections.0.weight": False,  # a list of matrices, no layers
    "h.1.attn.wq.weight": False,  # config.json has one layer
    "lm_head.weight": False,
    "tokens.weight": False,
}


def test_what_is_taken_for_a_linear() -> None:
    tensors = {n: ModelTensor(n, (16, 16), Unquantized(DType.BF16)) for n in MATRICES}
    family = guessed_family({"model_type": "strange", "n_layer": 1, "hidden_size": 16}, tensors)
    linear = {slot.module.format(layer=0) for slot in family.slots if slot.kind == "linear"}
    assert linear == {name.removesuffix(".weight") for name, taken in MATRICES.items() if taken}


def expert_stacks(first: tuple[int, int], second: tuple[int, int]) -> dict[str, ModelTensor]:
    shapes = {
        "h.0.mlp.experts.gate_up_proj": (4, *first),
        "h.0.mlp.experts.down_proj": (4, *second),
        "h.0.attn.wq.weight": (32, 32),
        "h.0.attn.wo.weight": (32, 32),
        "h.0.norm.weight": (32,),
    }
    return {n: ModelTensor(n, shape, Unquantized(DType.BF16)) for n, shape in shapes.items()}


@pytest.mark.parametrize(
    ("first", "second", "turned"),
    [
        ((96, 32), (32, 48), False),
        ((32, 96), (48, 32), True),
        ((32, 32), (32, 16), False),  # what one makes the other reads, twice where a gate is stacked on it
        ((32, 64), (32, 32), True),
        ((96, 16), (16, 48), False),  # experts on a width of their own
    ],
)
def test_stacks_of_experts_are_told_from_what_they_read(
    first: tuple[int, int], second: tuple[int, int], turned: bool
) -> None:
    config = {"model_type": "strange", "num_layers": 1, "hidden_size": 32, "num_experts": 4}
    family = guessed_family(config, expert_stacks(first, second))
    stacks = [fusion for fusion in family.fusions if fusion.per_expert]
    assert len(stacks) == 2 and {fusion.transposed for fusion in stacks} == {turned}
    assert family.open == ()


def test_a_square_stack_of_experts_is_open() -> None:
    config = {"model_type": "strange", "num_layers": 1, "hidden_size": 32, "num_experts": 4}
    family = guessed_family(config, expert_stacks((32, 32), (32, 32)))
    assert len(family.open) == 2 and "which axis is the input" in family.open[0]


def test_names_that_look_like_layers_do_not_make_the_guess_slow() -> None:
    import time

    tensors = {
        f"x.4000.t{i}.weight": ModelTensor(f"x.4000.t{i}.weight", (2, 2), Unquantized(DType.F32))
        for i in range(5000)
    }
    started = time.perf_counter()
    assert len(guessed_family({"model_type": "strange"}, tensors).slots) == 5000
    assert time.perf_counter() - started < 2
