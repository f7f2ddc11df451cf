"""Requests compiled to plans and config.json: ties, fusions, second quantizations, untouched keys."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import pytest

from qconvert import cli
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Encoding, ModelTensor, Unquantized
from qconvert.core.schemes import Scheme
from qconvert.errors import BadRecipe, CorruptCheckpoint, QConvertError, UnsupportedModel
from qconvert.models import Architecture, bind
from qconvert.ops import CheckFinite
from qconvert.plan.facts import HeadDifference
from qconvert.plan.loader_notices import ASYMMETRIC, FUSED, QUANTIZED_EMBEDDING, QUANTIZED_TIED_EMBEDDING
from qconvert.plan.recipe import Recipe, Rule
from qconvert.plan.request import COMMANDS, Request
from qconvert.plan.state import Compiled
from tests.support.compiling import EQUAL, compiled
from tests.support.models import EMBED, HEAD, tiny_config, tiny_shapes

BF16 = Unquantized(DType.BF16)
INT4 = AffineInt(4, 32, symmetric=True, scale_dtype=DType.BF16)
UNEQUAL = HeadDifference(100, 3, 0.25)
Q = "model.layers.0.self_attn.q_proj.weight"
INT4_RECIPE = Recipe(scheme=Scheme(4, 32))


def drafted(
    recipe: Recipe = Recipe(),  # noqa: B008 (frozen)
    *,
    encoding: Encoding = BF16,
    head: bool = False,
    fused: bool = False,
    difference: HeadDifference = EQUAL,
    request: Mapping[str, Any] | None = None,
    extra: Mapping[str, ModelTensor] | None = None,
    **config: Any,
) -> Compiled:
    """A request compiled for the tiny model: linears in `encoding`, `head` stores a tied head."""
    made = tiny_config(**config)
    architecture, shapes = Architecture.of(made), tiny_shapes(made)
    if head:
        shapes[HEAD] = shapes[EMBED]
    if fused:
        for entry in architecture.fused.values():
            shapes[entry.whole.name] = entry.whole.shape
            for part in entry.members:
                del shapes[part.name]
    tensors = {n: ModelTensor(n, s, encoding if "_proj.weight" in n else BF16) for n, s in shapes.items()}
    binding = bind(architecture, tensors | dict(extra or {}), allow_unknown=True)
    return compiled(binding, difference, **{"recipe": recipe, **(request or {})})


def refusal(*args: Any, **kwargs: Any) -> QConvertError:
    with pytest.raises(QConvertError) as caught:
        drafted(*args, **kwargs)
    return caught.value


def test_a_request_for_nothing_copies_and_checks() -> None:
    made = drafted()
    assert made.config == tiny_config() and not made.warnings and not made.notices
    assert all(unit.ops == (CheckFinite(),) for unit in made.plan.units)
    unchecked = drafted(request={"allow_nonfinite": True})
    assert not any(unit.ops for unit in unchecked.plan.units)


def test_a_stored_head_that_equals_the_embedding_is_written_once() -> None:
    made = drafted(head=True)
    assert HEAD not in made.plan.outputs and made.plan.dropped == (HEAD,)
    assert made.warnings[0].startswith(HEAD)


def test_a_stored_head_that_differs_is_refused_with_the_measure() -> None:
    error = refusal(head=True, difference=UNEQUAL)
    assert isinstance(error, CorruptCheckpoint)
    assert error.fact.startswith(f"{HEAD}: differs from {EMBED} in 3 of 100 numbers")
    assert "0.25" in error.fact and "untie" in str(error.hint)


@pytest.mark.parametrize("difference", [EQUAL, UNEQUAL])
def test_untying_keeps_a_stored_head(difference: HeadDifference) -> None:
    made = drafted(Recipe(tie=False), head=True, difference=difference)
    assert HEAD in made.plan.outputs and made.config["tie_word_embeddings"] is False


def test_untying_writes_the_embedding_as_the_head() -> None:
    made = drafted(Recipe(tie=False))
    unit = next(u for u in made.plan.units if u.output.name == HEAD)
    assert unit.inputs[0].tensor.name == EMBED and made.config["tie_word_embeddings"] is False


def test_tying_drops_an_equal_head() -> None:
    made = drafted(Recipe(tie=True), tied=False)
    assert HEAD not in made.plan.outputs and made.config["tie_word_embeddings"] is True


@pytest.mark.parametrize(
    ("recipe", "how", "fact"),
    [
        (Recipe(tie=True), {"tied": False, "difference": UNEQUAL}, "lm_head.weight: differs"),
        (Recipe(tie=True), {"tied": True}, "config.json: the head is already tied"),
        (Recipe(tie=False), {"tied": False}, "config.json: the head is already a table of its own"),
        (Recipe(fuse=("qkv",)), {"fused": True}, "nothing left to fuse (qkv)"),
        (Recipe(), {"request": {"unfuse": ("attn.qkv",)}}, "no fused linears"),
        (Recipe(), {"request": {"dequantize": True, "command": "dequantize"}}, "no quantized tensors"),
        (
            INT4_RECIPE,
            {"encoding": INT4},
            "model.layers.0.self_attn.q_proj.weight: already quantized (int4-g32)",
        ),
        (
            INT4_RECIPE.with_(fuse=("qkv",)),
            {"encoding": INT4},
            "model.layers.0.self_attn.qkv_proj.weight: already",
        ),
    ],
)
def test_what_would_change_nothing_or_lose_twice_is_refused(
    recipe: Recipe, how: dict[str, Any], fact: str
) -> None:
    assert refusal(recipe, **how).fact.startswith(fact)


@pytest.mark.parametrize("dtype", [DType.I8, DType.F8_E4M3])
def test_integers_without_scales_are_no_weights(dtype: DType) -> None:
    error = refusal(encoding=Unquantized(dtype))
    assert isinstance(error, UnsupportedModel) and error.fact.startswith(Q)


def test_quantizing_lists_what_was_kept_for_loaders() -> None:
    tied = drafted(INT4_RECIPE.with_(rules=(Rule("attn.o", None),))).config["quantization_config"]
    assert tied["kept"] == ["lm_head", "model.layers.0.self_attn.o_proj", "model.layers.1.self_attn.o_proj"]
    assert len(tied["forms"]) == 12 and tied["forms"][Q.removesuffix(".weight")] == "int4-g32"
    untied = drafted(INT4_RECIPE, tied=False).config["quantization_config"]
    assert untied["kept"] == ["lm_head"]
    headed = drafted(INT4_RECIPE.with_(rules=(Rule("lm_head", Scheme(8)),)), tied=False)
    assert headed.config["quantization_config"]["kept"] == []


def test_unknown_linears_are_listed_as_kept() -> None:
    extra = {"model.mtp.proj.weight": ModelTensor("model.mtp.proj.weight", (8, 8), BF16)}
    made = drafted(INT4_RECIPE, extra=extra, tied=False)
    assert made.config["quantization_config"]["kept"] == ["lm_head", "model.mtp.proj"]


def test_untying_and_quantizing_the_head_alone() -> None:
    recipe = INT4_RECIPE.with_(tie=False, rules=(Rule("lm_head", Scheme(8, 64)),))
    outputs = drafted(recipe).plan.outputs
    assert outputs[HEAD].encoding.label == "int8-g64" and outputs[EMBED].encoding == BF16


def test_a_copy_of_a_quantized_checkpoint_keeps_its_quantization_config() -> None:
    made = drafted(Recipe(fuse=("qkv",)), encoding=INT4)
    encodings = made.config["quantization_config"]["forms"]
    assert encodings["model.layers.0.self_attn.qkv_proj"] == "int4-g32"
    assert "quantization_config" not in drafted(encoding=INT4, request={"dequantize": True}).config


def test_dequantizing_takes_the_scales_dtype_or_the_one_asked_for() -> None:
    plain = drafted(encoding=INT4, request={"dequantize": True})
    assert {t.encoding for t in plain.plan.outputs.values()} == {BF16}
    wide = drafted(encoding=INT4, request={"dequantize": True, "dtype": DType.F32})
    assert {t.encoding for t in wide.plan.outputs.values()} == {Unquantized(DType.F32)}
    assert wide.config["torch_dtype"] == "float32"


def test_a_dtype_is_for_plain_tensors_and_new_scales() -> None:
    made = drafted(INT4_RECIPE, request={"dtype": DType.F16})
    assert made.plan.outputs[EMBED].encoding == Unquantized(DType.F16)
    assert made.plan.outputs[Q].encoding == AffineInt(4, 32, symmetric=True, scale_dtype=DType.F16)
    assert made.config["torch_dtype"] == "float16" and "dtype" not in made.config


def test_the_config_keeps_every_key_it_does_not_know() -> None:
    made = drafted(INT4_RECIPE, request={"dtype": DType.F32}, dtype="f16", rope_scaling={"factor": 2.0})
    changed = {"quantization_config", "torch_dtype"}
    before = tiny_config(rope_scaling={"factor": 2.0})
    assert {k: v for k, v in made.config.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }


def test_the_newer_spelling_of_the_dtype_key_is_followed() -> None:
    config = tiny_config(dtype="bf16")
    architecture = Architecture.of({**config, "torch_dtype": None, "dtype": "bfloat16"})
    tensors = {n: ModelTensor(n, s, BF16) for n, s in tiny_shapes(config).items()}
    made = compiled(bind(architecture, tensors), dtype=DType.F16)
    assert made.config["dtype"] == "float16"


def test_loaders_that_cannot_read_the_output_are_named_before_the_work() -> None:
    assert drafted(Recipe(fuse=("gate_up",))).notices == (FUSED,)
    assert drafted(INT4_RECIPE).notices == ()
    embed = INT4_RECIPE.with_(rules=(Rule("embed", Scheme(8)),))
    assert drafted(embed).notices == (QUANTIZED_TIED_EMBEDDING,)
    assert drafted(embed.with_(tie=False)).notices == drafted(embed, tied=False).notices
    assert drafted(embed, tied=False).notices == (QUANTIZED_EMBEDDING,)
    assert drafted(INT4_RECIPE.with_(rules=(Rule("lm_head", Scheme(8)),)), tied=False).notices == ()
    assert drafted(Recipe(scheme=Scheme(4, 32, symmetric=False))).notices == (ASYMMETRIC,)


@pytest.mark.parametrize(("name", "hint"), [("quantise", "'quantize'"), ("push", "to-gguf")])
def test_a_request_is_of_a_command_that_there_is(name: str, hint: str) -> None:
    with pytest.raises(BadRecipe, match=name) as refused:
        Request(name)
    assert hint in refused.value.hint


def test_every_command_that_writes_a_model_may_ask() -> None:
    """Those are the ones that can plan alone (--dry-run)."""
    modules = (import_module(f"qconvert.cli.{each.replace('-', '_')}") for each in cli.COMMANDS)
    commands = [module.command for module in modules]
    assert {each.name for each in commands if any(p.name == "dry_run" for p in each.params)} == {*COMMANDS}
