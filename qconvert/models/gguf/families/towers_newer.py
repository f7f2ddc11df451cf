"""Declares the files of Gemma 4's vision tower and of MoonViT, Kimi-VL's and K2.5's.

Keys, names and types are those of llama.cpp's `Gemma4VisionAudioModel` and `KimiK25Model` (b11549) and
`KimiVLModel` (0c1e57098).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from qconvert.core.config_json import optional_int, whole_numbers
from qconvert.core.ggml_types import KV
from qconvert.core.numbers import positive_number
from qconvert.models.families import vision
from qconvert.models.families.vision import PREPROCESSOR, WHOLE
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, derived
from qconvert.models.gguf.families.towers import blocks, encoder, epsilon, parts_of_rows, projector
from qconvert.models.rope import rope_fields

_COLOURS = 3
_POOLED = 3  # patches a side that make a token, where a file does not say it
_PATCHES = {"v.patch_embd.weight": ("F16", "F16")}


@derived
def _gemma4(facts: Facts) -> Iterator[KV]:
    yield facts.text("vision.projector_type", "gemma4v")
    yield epsilon(facts, facts.settings)
    pooled = optional_int(facts.settings, "pooling_kernel_size") or _POOLED
    if pooled != _POOLED:
        yield facts.u32("vision.projector.scale_factor", pooled)


def _colours_apart(facts: Facts) -> tuple[int, int]:
    """The numbers of a patch come by points; a convolution has them by colours."""
    return facts.dimensions[0]["patch"] ** 2, _COLOURS


def _convolution(facts: Facts) -> tuple[int, ...]:
    side = facts.dimensions[0]["patch"]
    return facts.dimensions[0]["hidden"], _COLOURS, side, side


def _one(facts: Facts) -> tuple[int, ...]:
    """A vector of one number: the bound of a clipped linear, which has no dimensions in a checkpoint."""
    return (1,)


def _without_sound(facts: Facts) -> str | None:
    """Names what the file lacks of a model that hears, too."""
    if not isinstance(facts.settings[WHOLE].get("audio_config"), dict):
        return None
    return "audio_config: the tower for sound is left out; the file holds that for pictures"


def _base_of_angles(facts: Facts) -> str | None:
    theta = rope_fields(facts.settings)["rope_theta"] if facts.settings.get("rope_parameters") else 100.0
    return None if theta == 100 else f"rope_theta is {theta}; llama.cpp has 100 for Gemma 4's tower"


def _heads_of_their_own(facts: Facts) -> str | None:
    heads, kv_heads = facts.size("num_attention_heads"), facts.dimensions[0]["kv_heads"]
    if heads == kv_heads:
        return None
    return f"num_key_value_heads is {kv_heads}; llama.cpp's towers have {heads}, one for each query"


_NORMS = {
    "input_layernorm": "ln1",
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "ln2",
    "post_feedforward_layernorm": "ffn_post_norm",
}
_OF_LAYERS = {
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.o": "attn_out",
    "vision.q_norm": "attn_q_norm",
    "vision.k_norm": "attn_k_norm",
    **{f"vision.mlp.{part}": f"ffn_{part}" for part in ("gate", "up", "down")},
}
_POSITIONS = "vision_tower.patch_embedder.position_embedding_table"
GEMMA4 = GGUFModel(
    "clip",
    keys=(),
    # No side of a picture is fixed; the converter writes this one, too.
    late=(encoder(lambda facts: 224, "num_attention_heads"), _gemma4),
    roles={
        "vision.patches": Written("v.patch_embd", "swap_groups", groups=_colours_apart, shape=_convolution),
        vision.role(_POSITIONS): Written("v.position_embd", suffix=".weight"),
        **{role: Written(f"v.blk.{{layer}}.{name}") for role, name in _OF_LAYERS.items()},
        **{
            f"{role}.{bound}": Written(f"v.blk.{{layer}}.{_OF_LAYERS[role]}", shape=_one, suffix=f".{bound}")
            for role in vision.GEMMA_MODULES
            for bound in vision.BOUNDS
        },
        **blocks(vision.GEMMA, _NORMS),
        **{
            vision.role(f"vision_tower.{name}"): Written(f"v.{name}", suffix="")
            for name in ("std_bias", "std_scale")
        },
        "vision.projection": Written("mm.input_projection"),
    },
    checks=(
        c.computes("hidden_activation", "gelu_pytorch_tanh"),
        c.computes("attention_bias", False),
        _base_of_angles,
        _heads_of_their_own,
    ),
    remarks=(_without_sound,),
    types=_PATCHES,
    kind="mmproj",
)


def _height(facts: Facts) -> int:
    return facts.dimensions[0]["height"] * facts.dimensions[0]["patch"]


def _axes_apart(facts: Facts, part: int, heads: int) -> Iterator[range]:
    """Yields the rows of q (part 0) or k: in every head pairs that turn by columns, then those by rows.

    A checkpoint has them in turns.
    """
    rows = facts.dimensions[0]["heads_width"]
    width = rows // heads
    for head in range(heads):
        for axis in range(2):
            for pair in range(width // 4):
                start = part * rows + head * width + 4 * pair + 2 * axis
                yield range(start, start + 2)


def _turned(facts: Facts) -> Iterator[range]:
    """Yields the rows of q, k and v in one tensor."""
    rows, heads = facts.dimensions[0]["heads_width"], facts.size("vt_num_attention_heads")
    for part in range(2):
        yield from _axes_apart(facts, part, heads)
    yield range(2 * rows, 3 * rows)


@derived
def _kimi(facts: Facts) -> Iterator[KV]:
    for side in ("height", "width"):
        yield KV.u32(f"vision.pos_emb_{side}", facts.dimensions[0][side])
    yield KV.u32("vision.pos_emb_time", optional_int(facts.settings, "init_pos_emb_time") or 4)
    yield facts.flagged("use_gelu", value=facts.settings.get("projector_hidden_act", "gelu") == "gelu")
    found = positive_number(facts.settings.get("projector_ln_eps"))
    yield facts.f32("vision.attention.layer_norm_epsilon", found or 1e-5)
    yield facts.u32(
        "vision.projector.scale_factor", (whole_numbers(facts.settings, "merge_kernel_size") or (2,))[0]
    )
    points = facts.dimensions[0]["patch"] ** 2
    most = optional_int(facts.settings[PREPROCESSOR], "in_patch_limit") or 16384
    yield facts.u32("vision.image_min_pixels", 8 * points)
    yield facts.u32("vision.image_max_pixels", most * points)


def _with_biases(facts: Facts) -> str | None:
    if facts.dimensions[0]["bias"]:
        return None
    return (
        "norm_type is 'rmsnorm', but llama.cpp's kimik25 has norms with biases, and none after the projector"
    )


def _both(module: str, name: str) -> dict[str, Written]:
    """A linear or a norm, and the bias that is a tensor of its own here."""
    role = vision.role(module)
    return {role: Written(name), f"{role}.bias": Written(name, suffix=".bias")}


_BLOCK = {
    "norm0": "ln1", "norm1": "ln2", "wo": "attn_out", "mlp.fc0": "ffn_up", "mlp.fc1": "ffn_down"
}  # fmt: skip
_QKV = vision.role(vision.KIMI + "wqkv")
_KIMI_POSITIONS = vision.role("vision_tower.patch_embed.pos_emb.weight")
_MOON_VIT = {
    vision.role("vision_tower.patch_embed.proj.weight"): Written("v.patch_embd", suffix=".weight"),
    vision.role("vision_tower.patch_embed.proj.bias"): Written("v.patch_embd", suffix=".bias"),
    _KIMI_POSITIONS: Written("v.position_embd", suffix=".weight"),
    **{
        role: written
        for ours, theirs in _BLOCK.items()
        for role, written in _both(vision.KIMI + ours, f"v.blk.{{layer}}.{theirs}").items()
    },
    **_both("vision_tower.encoder.final_layernorm", "v.post_ln"),
}
KIMI = GGUFModel(
    "clip",
    keys=(),
    late=(
        encoder(_height, "vt_num_attention_heads"),
        projector("kimik25"),
        _kimi,
    ),
    roles={
        **_MOON_VIT,
        _QKV: Written("v.blk.{layer}.attn_qkv", rows=_turned),
        f"{_QKV}.bias": Written("v.blk.{layer}.attn_qkv", rows=_turned, suffix=".bias"),
        **_both("mm_projector.pre_norm", "mm.input_norm"),
        **_both("mm_projector.proj.0", "mm.1"),
        **_both("mm_projector.proj.2", "mm.2"),
    },
    checks=(_with_biases,),
    types=_PATCHES,
    kind="mmproj",
)


@derived
def _kimi_vl(facts: Facts) -> Iterator[KV]:
    yield facts.flagged("use_gelu", value=True)
    yield facts.u32("vision.projector.scale_factor", 2)
    found = positive_number(facts.settings.get("layer_norm_eps"))
    yield facts.f32("vision.attention.layer_norm_epsilon", found or 1e-5)


def _flat(facts: Facts) -> tuple[int, ...]:
    """All positions in one list, row by row."""
    dims = facts.dimensions[0]
    return dims["height"] * dims["width"], dims["hidden"]


def _square_positions(facts: Facts) -> str | None:
    height, width = facts.dimensions[0]["height"], facts.dimensions[0]["width"]
    if height == width:
        return None
    return f"init_pos_emb_height is {height}, init_pos_emb_width {width}; llama.cpp's kimivl has a square"


def _four_to_a_token(facts: Facts) -> str | None:
    kernel = facts.settings.get("merge_kernel_size", [2, 2])
    return None if kernel == [2, 2] else f"merge_kernel_size is {kernel}; llama.cpp's kimivl has [2, 2]"


def _kimi_vl_rows(facts: Facts, part: int) -> Iterator[range]:
    """Yields the rows of q (part 0), k or v.

    llama.cpp's converter leaves those of q and k as they are; its graph, that of Kimi-K2.5, then turns other
    pairs than the model does.
    """
    if part == 2:
        return parts_of_rows(facts, part)
    return _axes_apart(facts, part, facts.size("num_attention_heads"))


def _rows_apart(suffix: str) -> tuple[Written, ...]:
    return tuple(
        Written(f"v.blk.{{layer}}.attn_{name}", rows=partial(_kimi_vl_rows, part=part), suffix=suffix)
        for part, name in enumerate("qkv")
    )


KIMI_VL = GGUFModel(
    "clip",
    keys=(),
    late=(
        encoder(lambda facts: 64 * 14, "num_attention_heads"),  # of no size: the converter writes this one
        projector("kimivl"),
        _kimi_vl,
    ),
    roles={
        **_MOON_VIT,
        _KIMI_POSITIONS: Written("v.position_embd", suffix=".weight", shape=_flat),
        _QKV: _rows_apart(".weight"),
        f"{_QKV}.bias": _rows_apart(".bias"),
        **_both("multi_modal_projector.pre_norm", "mm.input_norm"),
        **_both("multi_modal_projector.linear_1", "mm.1"),
        **_both("multi_modal_projector.linear_2", "mm.2"),
    },
    checks=(_square_positions, _four_to_a_token),
    types=_PATCHES,
    kind="mmproj",
)
