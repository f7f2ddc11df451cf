"""GGUF tensor names: gguf's own table as oracle."""

from __future__ import annotations

import pytest

from qconvert.errors import UnsupportedModel
from qconvert.models.gguf.names import gguf_name

HUGGING_FACE = {
    "embed": "model.embed_tokens",
    "lm_head": "lm_head",
    "final_norm": "model.norm",
    "attn.norm": "model.layers.17.input_layernorm",
    "attn.q": "model.layers.17.self_attn.q_proj",
    "attn.k": "model.layers.17.self_attn.k_proj",
    "attn.v": "model.layers.17.self_attn.v_proj",
    "attn.o": "model.layers.17.self_attn.o_proj",
    "attn.q_norm": "model.layers.17.self_attn.q_norm",
    "attn.k_norm": "model.layers.17.self_attn.k_norm",
    "mlp.norm": "model.layers.17.post_attention_layernorm",
    "mlp.gate": "model.layers.17.mlp.gate_proj",
    "mlp.up": "model.layers.17.mlp.up_proj",
    "mlp.down": "model.layers.17.mlp.down_proj",
    "mlp.router": "model.layers.17.mlp.gate",
    "mlp.experts.gate": "model.layers.17.mlp.experts.gate_proj",
    "mlp.experts.up": "model.layers.17.mlp.experts.up_proj",
    "mlp.experts.down": "model.layers.17.mlp.experts.down_proj",
    "mlp.shared.gate": "model.layers.17.mlp.shared_expert.gate_proj",
    "mlp.shared.up": "model.layers.17.mlp.shared_expert.up_proj",
    "mlp.shared.down": "model.layers.17.mlp.shared_expert.down_proj",
    "mlp.shared_gate": "model.layers.17.mlp.shared_expert_gate",
}


def test_names_are_those_gguf_gives_hugging_faces() -> None:
    gguf = pytest.importorskip("gguf")
    maps = [
        gguf.get_tensor_name_map(arch, 24)
        for arch in (gguf.MODEL_ARCH.QWEN3, gguf.MODEL_ARCH.QWEN2MOE, gguf.MODEL_ARCH.LLAMA)
    ]
    for role, module in HUGGING_FACE.items():
        layer = 17 if ".17." in module else None
        theirs = {each.get_name(f"{module}.weight", try_suffixes=(".weight",)) for each in maps} - {None}
        assert theirs == {gguf_name(role, layer)}, role


def test_a_role_without_a_name_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"mlp\.gate_up of layer 3: GGUF has no name"):
        gguf_name("mlp.gate_up", 3)
    with pytest.raises(UnsupportedModel):
        gguf_name("attn.q", None)
