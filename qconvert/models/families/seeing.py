"""Declares models that are another family's language model beside a tower: SmolVLM, Idefics3, InternVL.

Sources: transformers' `modeling_smolvlm`, `modeling_idefics3` and `modeling_internvl`, and the files
published as `internvl_chat`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.errors import UnsupportedModel, shown
from qconvert.models.families import common as c
from qconvert.models.families import tower_tiles
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import Dimensions, ParameterTemplate

CARRIED = {r"(model\.)?(vision_model|vision_tower|multi_modal_projector|connector|mlp1)\..*": "vision"}

SMOLVLM = replace(
    LLAMA,
    name="SmolVLM, Idefics3",
    model_types=("smolvlm", "idefics3"),
    classes=("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    spellings=({"model.": "model.text_model."},),
    carried=CARRIED,
    tower=tower_tiles.SMOLVLM_TOWER,
    note="a Llama; the vision tower is copied as it is",
)

INSIDE = ("llama", "qwen2", "qwen3")
"""The types of InternVL's language models that are declared."""


def internvl_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns InternVL's dimensions: Qwen2 has biases in attention, Qwen3 norms of heads."""
    inner = config.get("model_type")
    if inner not in INSIDE:
        raise UnsupportedModel(
            f"config.json: the language model is {shown(repr(inner))}, which is not known inside InternVL",
            f"known: {', '.join(INSIDE)}; --allow-unknown does not help: convert only the language model",
        )
    dims = dict(c.dense_dimensions(config, layer))
    biased = inner == "qwen2"
    return {
        **dims,
        "q_bias": dims["q_rows"] if biased else 0,
        "kv_bias": dims["kv_rows"] if biased else 0,
        "head_norm": dims["head_dim"] if inner == "qwen3" else 0,
    }


def _bias(role: str, part: str, size: str) -> ParameterTemplate:
    return ParameterTemplate(role, f"{c.LAYER}self_attn.{part}_proj", (size,), "bias", suffix=".bias")


INTERNVL = replace(
    LLAMA,
    name="InternVL 2 to 3.5",
    model_types=("internvl",),
    classes=("InternVLForConditionalGeneration",),
    slots=c.decoder(
        (
            *c.attention(),
            _bias("attn.q", "q", "q_bias"),
            _bias("attn.k", "k", "kv_bias"),
            _bias("attn.v", "v", "kv_bias"),
            c.norm("attn.q_norm", c.LAYER + "self_attn.q_norm", "head_norm"),
            c.norm("attn.k_norm", c.LAYER + "self_attn.k_norm", "head_norm"),
        ),
        c.gated_mlp(),
    ),
    dimensions=internvl_dimensions,
    spellings=c.NESTED,
    carried=CARRIED,
    tower=tower_tiles.INTERNVL_HF_TOWER,
    note="a Llama, Qwen2 or Qwen3; the vision tower is copied as it is",
)
INTERNVL_CHAT = replace(
    INTERNVL,
    name="InternVL as first published",
    model_types=("internvl_chat",),
    classes=("InternVLChatModel",),
    tower=tower_tiles.INTERNVL_TOWER,
)

FAMILIES = (SMOLVLM, INTERNVL, INTERNVL_CHAT)
