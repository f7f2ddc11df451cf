"""Declares the files of towers that see a picture in tiles: SmolVLM's, InternVL's and Llama 4's."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from qconvert.core.config_json import optional_int
from qconvert.core.ggml_types import KV
from qconvert.models.families import tower_tiles as t
from qconvert.models.families.vision import PREPROCESSOR, WHOLE, role
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, derived
from qconvert.models.gguf.families.towers import (
    FC,
    blocks,
    encoder,
    epsilon,
    parts_of_rows,
    projector,
    siglip,
)

_PATCHES = {"v.patch_embd.weight": ("F16", "F16")}


def _size(facts: Facts) -> int:
    return t.side(facts.settings, "image_size")


def _whole_number(facts: Facts, key: str, default: int = 0) -> int:
    return optional_int(facts.settings[WHOLE], key) or default


@derived
def _smolvlm(facts: Facts) -> Iterator[KV]:
    """Writes how many neighbours a side make a token, and the longest side of a picture before it is cut."""
    yield epsilon(facts, facts.settings, "layer_norm_eps")
    yield facts.u32("vision.projector.scale_factor", _whole_number(facts, "scale_factor", 2))
    yield facts.flagged("use_gelu", value=True)
    longest = facts.settings[PREPROCESSOR].get("size")
    edge = optional_int(longest, "longest_edge") if isinstance(longest, dict) else None
    yield facts.u32("vision.preproc_image_size", edge or _size(facts))


SMOLVLM = GGUFModel(
    "clip",
    keys=(),
    late=(encoder(_size, "num_attention_heads"), projector("idefics3"), _smolvlm),
    roles={
        **siglip(t.SMOL),
        "vision.projection": Written("mm.model.fc"),
    },
    checks=(c.computes("hidden_act", "gelu_pytorch_tanh", "gelu"),),
    kind="mmproj",
)


def _neighbours(facts: Facts) -> int:
    return t.neighbours(facts.settings, "downsample_ratio", 0.5)


@derived
def _internvl(facts: Facts) -> Iterator[KV]:
    """Writes the activation, how many neighbours a side make a token, and into how many tiles to cut."""
    yield epsilon(facts, facts.settings, "layer_norm_eps")
    yield facts.flagged(f"use_{facts.settings.get('hidden_act', 'gelu')}", value=True)
    yield facts.u32("vision.projector.scale_factor", _neighbours(facts))
    for key, name in (("min_dynamic_patch", "min_tiles"), ("max_dynamic_patch", "max_tiles")):
        if _whole_number(facts, key):
            yield facts.u32(f"vision.preproc_{name}", _whole_number(facts, key))


def rms_by_size(facts: Facts) -> str | None:
    """Refuses RMS norms in another tower than the one of 6 billion parameters, as which they are known."""
    big = facts.dimensions[0]["hidden"] == 3200 and facts.layers == 45
    if big == (facts.settings.get("norm_type") == "rms_norm"):
        return None
    return (
        f"norm_type is {facts.settings.get('norm_type')!r} in a tower of {facts.layers} layers, but "
        "llama.cpp has RMS norms only in that of 45 layers of 3200"
    )


_LAYER = "v.blk.{layer}."
_SCALES = {f"ls{i}": f"ls{i}" for i in (1, 2)}


def _with_biases(layer: str, names: dict[str, str], *plain: str) -> dict[str, Written]:
    """Returns modules of a layer whose biases have a role of their own."""
    return {
        **blocks(layer, names),
        **{role(f"{layer}{name}.bias"): Written(_LAYER + names[name], suffix=".bias") for name in plain},
    }


def _third(part: int, suffix: str | None = None) -> Written:
    return Written(f"{_LAYER}attn_{'qkv'[part]}", rows=partial(parts_of_rows, part=part), suffix=suffix)


def _class_last(facts: Facts) -> Iterator[range]:
    """Yields the rows of patches' positions, and that of the class token, which its graph puts last.

    llama.cpp's converter leaves it first, so that in its files every patch has its neighbour's position.
    """
    yield range(1, facts.dimensions[0]["positions"])
    yield range(1)


def _positions(facts: Facts) -> tuple[int, ...]:
    dims = facts.dimensions[0]
    return 1, dims["positions"], dims["hidden"]


_POSITIONS = Written("v.position_embd", rows=_class_last, shape=_positions)
_HF = {f"attention.{part}_proj": f"attn_{part}" for part in "qkv"}
_HF_NORMS = {"layernorm_before": "ln1", "layernorm_after": "ln2"}
INTERNVL = GGUFModel(
    "clip",
    keys=(),
    late=(encoder(_size, "num_attention_heads"), projector("internvl"), _internvl),
    roles={
        # As it was first published.
        role(t.INTERN_EMBEDDINGS + "class_embedding"): Written("v.class_embd", suffix=""),
        role(t.INTERN_EMBEDDINGS + "patch_embedding.weight"): Written("v.patch_embd"),
        role(t.INTERN_EMBEDDINGS + "patch_embedding.bias"): Written("v.patch_embd", suffix=".bias"),
        role(t.INTERN_EMBEDDINGS + "position_embedding"): _POSITIONS,
        role(t.INTERN + "attn.qkv"): tuple(map(_third, range(3))),
        role(t.INTERN + "attn.qkv.bias"): tuple(_third(part, suffix=".bias") for part in range(3)),
        **_with_biases(t.INTERN, {"norm1": "ln1", "norm2": "ln2"}, "norm1", "norm2"),
        **blocks(t.INTERN, {"attn.proj": "attn_out", **FC, **_SCALES}),
        **{role(f"mlp1.{i}"): Written(f"mm.model.mlp.{i}") for i in (0, 1, 3)},
        # As transformers has it.
        role(t.INTERN_HF_EMBEDDINGS + "cls_token"): Written("v.class_embd", suffix=""),
        role(t.INTERN_HF_EMBEDDINGS + "patch_embeddings.projection.weight"): Written("v.patch_embd"),
        role(t.INTERN_HF_EMBEDDINGS + "patch_embeddings.projection.bias"): Written(
            "v.patch_embd", suffix=".bias"
        ),
        role(t.INTERN_HF_EMBEDDINGS + "position_embeddings"): _POSITIONS,
        **_with_biases(t.INTERN_HF, _HF, *_HF),
        **_with_biases(t.INTERN_HF, _HF_NORMS, *_HF_NORMS),
        **blocks(t.INTERN_HF, {"attention.projection_layer": "attn_out", **FC}),
        **blocks(t.INTERN_HF, {f"lambda_{i}": f"ls{i}" for i in (1, 2)}),
        role("multi_modal_projector.layer_norm"): Written("mm.model.mlp.0"),
        role("multi_modal_projector.linear_1"): Written("mm.model.mlp.1"),
        role("multi_modal_projector.linear_2"): Written("mm.model.mlp.3"),
        **{f"vision.{part}_norm": Written(f"{_LAYER}attn_{part}_norm") for part in "qk"},
    },
    checks=(c.computes("hidden_act", "gelu", "silu"), rms_by_size),
    types=_PATCHES,
    kind="mmproj",
)


@derived
def _llama4(facts: Facts) -> Iterator[KV]:
    yield epsilon(facts, facts.settings, "norm_eps")
    shuffled = t.neighbours(facts.settings | {WHOLE: facts.settings}, "pixel_shuffle_ratio", 0.5)
    yield facts.u32("vision.projector.scale_factor", shuffled)
    yield facts.flagged("use_gelu", value=True)


LLAMA4 = GGUFModel(
    "clip",
    keys=(),
    late=(encoder(_size, "num_attention_heads"), projector("llama4"), _llama4),
    roles={
        role("vision_model.class_embedding"): Written("v.class_embd", suffix=""),
        role("vision_model.positional_embedding_vlm"): Written("v.position_embd"),
        "vision.patches": Written("v.patch_embd"),
        role("vision_model.layernorm_pre"): Written("v.pre_ln"),
        role("vision_model.layernorm_post"): Written("v.post_ln"),
        "vision.adapter.1": Written("mm.model.mlp.1"),
        "vision.adapter.2": Written("mm.model.mlp.2"),
        "vision.projection": Written("mm.model.fc"),
        **blocks(
            t.LLAMA4,
            {
                **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
                "self_attn.o_proj": "attn_out",
                "input_layernorm": "ln1",
                "post_attention_layernorm": "ln2",
                **FC,
            },
        ),
    },
    checks=(c.computes("hidden_act", "gelu"),),
    types=_PATCHES,
    kind="mmproj",
)
