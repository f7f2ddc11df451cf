"""Declares the files of vision towers, which llama.cpp keeps beside the language model (`mmproj`).

Keys, names and types are those of its converter's MmprojModel classes; `tools/mtmd/clip.cpp` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from qconvert.core.config_json import optional_int, whole_numbers
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.models.families import vision
from qconvert.models.families.vision import PREPROCESSOR, WHOLE
from qconvert.models.gguf.declaration import Facts, GGUFModel, Keys, Written, derived

_COLOURS = 3


def _numbers(facts: Facts, key: str) -> tuple[float, ...]:
    found = facts.settings[PREPROCESSOR].get(key)
    numbers = found if isinstance(found, list) else []
    if len(numbers) != _COLOURS or not all(number == 0 or positive_number(number) for number in numbers):
        raise CorruptCheckpoint(
            f"preprocessor_config.json: {key} is not a list of {_COLOURS} numbers",
            "copy the model's preprocessor_config.json into the folder",
        )
    return tuple(map(float, numbers))


def encoder(image_size: Callable[[Facts], int], heads: str, *, width: str = "intermediate") -> Keys:
    """Declares what every tower's file begins with."""

    @derived
    def keys(facts: Facts) -> Iterator[KV]:
        dims = facts.dimensions[0]
        yield facts.flagged("has_vision_encoder", value=True)
        yield facts.u32("vision.projection_dim", facts.size(vision.TEXT_HIDDEN))
        yield facts.u32("vision.image_size", image_size(facts))
        yield facts.u32("vision.patch_size", dims["patch"])
        yield facts.u32("vision.embedding_length", dims["hidden"])
        yield facts.u32("vision.feed_forward_length", dims[width])
        yield facts.u32("vision.block_count", facts.layers)
        yield facts.u32("vision.attention.head_count", facts.size(heads))
        for name in ("image_mean", "image_std"):
            yield KV.f32s(f"clip.vision.{name}", _numbers(facts, name))

    return keys


def epsilon(facts: Facts, settings: Json, key: str = "rms_norm_eps") -> KV:
    """Returns the epsilon of a tower's norms, which a config holds under `key`."""
    return facts.f32("vision.attention.layer_norm_epsilon", positive_number(settings.get(key)) or 1e-6)


def parts_of_rows(facts: Facts, part: int) -> Iterator[range]:
    """Yields the rows of q (part 0), k or v where they are one tensor."""
    rows = facts.dimensions[0]["hidden"]
    yield range(part * rows, (part + 1) * rows)


def _frame(facts: Facts, frame: int) -> Iterator[range]:
    dims = facts.dimensions[0]
    rows = dims["patch"]
    for channel in range(dims["hidden"] * dims["channels"]):
        start = (channel * dims["frames"] + frame) * rows
        yield range(start, start + rows)


def _patch_shape(facts: Facts) -> tuple[int, ...]:
    dims = facts.dimensions[0]
    return dims["hidden"], dims["channels"], dims["patch"], dims["patch"]


def blocks(layer: str, names: Mapping[str, str]) -> dict[str, Written]:
    """Returns the modules of a layer under llama.cpp's names."""
    return {vision.role(layer + ours): Written("v.blk.{layer}." + theirs) for ours, theirs in names.items()}


_Roles = Mapping[str, Written | tuple[Written, ...]]


def _qwen(names: Mapping[str, str], others: _Roles) -> _Roles:
    frames = tuple(
        Written(
            "v.patch_embd",
            rows=partial(_frame, frame=frame),
            shape=_patch_shape,
            suffix=suffix,
        )
        for frame, suffix in enumerate((".weight", ".weight.1"))
    )
    return {
        vision.role("visual.patch_embed.proj.weight"): frames,
        **blocks(vision.QWEN, {"norm1": "ln1", "norm2": "ln2", "attn.proj": "attn_out", **names}),
        **others,
    }


def _two_frames(facts: Facts) -> str | None:
    """Refuses patches of other than two frames, which have two tensors in the file."""
    frames = facts.dimensions[0]["frames"]
    return None if frames == 2 else f"temporal_patch_size is {frames}; llama.cpp has patches of 2 frames"


# Qwen3-VL's stay fused.
_QKV = {
    vision.role(vision.QWEN + "attn.qkv"): tuple(
        Written(f"v.blk.{{layer}}.attn_{name}", rows=partial(parts_of_rows, part=part))
        for part, name in enumerate("qkv")
    )
}
_MERGER = {
    vision.role("visual.merger.ln_q"): Written("v.post_ln"),
    vision.role("visual.merger.mlp.0"): Written("mm.0"),
    vision.role("visual.merger.mlp.2"): Written("mm.2"),
}
FC = {"mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}


def projector(kind: str, *flags: str) -> Keys:
    """Declares the kind of the tower, and flags that are set."""

    @derived
    def keys(facts: Facts) -> Iterator[KV]:
        yield facts.text("projector_type", kind)
        for flag in flags:
            yield facts.flagged(flag, value=True)

    return keys


@derived
def _qwen_epsilon(facts: Facts) -> Iterator[KV]:
    yield epsilon(facts, facts.settings[WHOLE])


# Qwen2-VL's width is under a key that means the language model's in its config, and so does the converter.
QWEN2 = GGUFModel(
    "clip",
    keys=(),
    late=(
        encoder(lambda facts: facts.optional("image_size") or 560, "num_heads", width="out"),
        projector("qwen2vl_merger"),
        _qwen_epsilon,
    ),
    roles=_qwen(FC, {**_QKV, **_MERGER}),
    checks=(_two_frames,),
    types={"v.patch_embd.weight": ("F16", "F16"), "v.patch_embd.weight.1": ("F16", "F16")},
    kind="mmproj",
)


@derived
def _windows(facts: Facts) -> Iterator[KV]:
    """Writes that every n-th layer sees the whole image, the others windows of it."""
    full = sorted(whole_numbers(facts.settings, "fullatt_block_indexes"))
    step = full[0] + 1 if full else 0
    if full != list(range(step - 1, step * len(full), step or 1)) or not full:
        raise UnsupportedModel(
            f"config.json: fullatt_block_indexes is {full}, not every n-th layer, as llama.cpp has them",
            "keep the vision tower in safetensors",
        )
    yield facts.u32("vision.n_wa_pattern", step)


QWEN25 = replace(
    QWEN2,
    late=(
        encoder(lambda facts: facts.optional("image_size") or 560, "num_heads"),
        projector("qwen2.5vl_merger", "use_silu"),
        _windows,
        _qwen_epsilon,
    ),
    roles={
        **_qwen({}, {**_QKV, **_MERGER}),
        **{f"vision.mlp.{part}": Written(f"v.blk.{{layer}}.ffn_{part}") for part in ("gate", "up", "down")},
    },
)


def _square(facts: Facts) -> int:
    """Returns the side of the image that has a position for every patch."""
    return int(math.sqrt(facts.dimensions[0]["positions"]) * facts.dimensions[0]["patch"])


@derived
def _deepstack(facts: Facts) -> Iterator[KV]:
    text = facts.settings[WHOLE].get("text_config")
    yield facts.u32("vision.spatial_merge_size", optional_int(facts.settings, "spatial_merge_size") or 2)
    yield epsilon(facts, text if isinstance(text, dict) else {})
    deep = whole_numbers(facts.settings, "deepstack_visual_indexes")
    yield facts.flags_by_layer("vision.is_deepstack_layers", (i in deep for i in range(facts.layers)))


def _qwen3(config: Json) -> GGUFModel:
    """Returns Qwen3-VL's declaration for one config, which numbers the mergers of its deeper layers."""
    mergers = {
        vision.role(f"visual.deepstack_merger_list.{i}.{ours}"): Written(f"v.deepstack.{layer}.{theirs}")
        for i, layer in enumerate(whole_numbers(config, "deepstack_visual_indexes"))
        for ours, theirs in (("norm", "norm"), ("linear_fc1", "fc1"), ("linear_fc2", "fc2"))
    }
    return replace(QWEN3, roles={**QWEN3.roles, **mergers})


QWEN3 = replace(
    QWEN2,
    late=(encoder(_square, "num_heads"), projector("qwen3vl_merger", "use_gelu"), _deepstack),
    roles=_qwen(
        {"attn.qkv": "attn_qkv", "mlp.linear_fc1": "ffn_up", "mlp.linear_fc2": "ffn_down"},
        {
            vision.role("visual.patch_embed.proj.bias"): Written("v.patch_embd", suffix=".bias"),
            vision.role("visual.pos_embed.weight"): Written("v.position_embd"),
            vision.role("visual.merger.norm"): Written("v.post_ln"),
            vision.role("visual.merger.linear_fc1"): Written("mm.0"),
            vision.role("visual.merger.linear_fc2"): Written("mm.2"),
        },
    ),
    variant=_qwen3,
)


@derived
def _pooled(facts: Facts) -> Iterator[KV]:
    """Writes over how many patches a side tokens are averaged, where it is not the usual 4."""
    tokens = optional_int(facts.settings[PREPROCESSOR], "image_seq_length") or 256
    across = facts.size("image_size") // facts.dimensions[0]["patch"]
    factor = across // math.isqrt(tokens)
    yield epsilon(facts, facts.settings, "layer_norm_eps")
    yield facts.flagged("use_gelu", value=True)
    if factor not in (0, 4):
        yield facts.u32("vision.projector.scale_factor", factor)


def siglip(tower: str) -> dict[str, Written]:
    """Returns what is written of SigLIP under the module `tower`."""
    embeddings = tower + vision.SIGLIP_EMBEDDINGS
    return {
        vision.role(embeddings + "patch_embedding.weight"): Written("v.patch_embd"),
        vision.role(embeddings + "patch_embedding.bias"): Written("v.patch_embd", suffix=".bias"),
        vision.role(embeddings + "position_embedding.weight"): Written("v.position_embd"),
        vision.role(tower + vision.SIGLIP_NORM): Written("v.post_ln"),
        **blocks(
            tower + vision.SIGLIP_LAYER,
            {
                "layer_norm1": "ln1",
                "layer_norm2": "ln2",
                **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "out")},
                **FC,
            },
        ),
    }


GEMMA3 = replace(
    QWEN2,
    late=(
        encoder(lambda facts: facts.size("image_size"), "num_attention_heads"),
        projector("gemma3"),
        _pooled,
    ),
    roles={
        **siglip(vision.GEMMA3),
        vision.role("multi_modal_projector.mm_input_projection_weight"): Written("mm.input_projection"),
        vision.role("multi_modal_projector.mm_soft_emb_norm"): Written("mm.soft_emb_norm", "plus_one"),
    },
    checks=(),
    types={"mm.input_projection.weight": ("", "F16")},  # which clip.cpp multiplies by in half precision
)
