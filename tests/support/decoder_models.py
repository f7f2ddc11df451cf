"""Tiny random transformers models, and their weights as the decoder asks for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from qconvert.core.dtypes import DType
from qconvert.core.values import DenseRows, Value
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder

SIZES: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
MOE_SIZES: dict[str, Any] = SIZES | {
    "moe_intermediate_size": 24,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "mlp_only_layers": [1],
}

_NAMES = {
    "embed": "model.embed_tokens",
    "lm_head": "lm_head",
    "final_norm": "model.norm",
    "attn.norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.o": "self_attn.o_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "mlp.norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_expert.gate_proj",
    "mlp.shared.up": "mlp.shared_expert.up_proj",
    "mlp.shared.down": "mlp.shared_expert.down_proj",
    "mlp.shared_gate": "mlp.shared_expert_gate",
}
_STACKS = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "mlp.gate_up": ("mlp.gate", "mlp.up")}


class StateDict:
    """The decoder's `Weights` over a transformers state dict; `fused` stacks qkv and gate_up."""

    def __init__(self, state: dict[str, torch.Tensor], *, fused: bool = False) -> None:
        self.state = state
        self.fused = fused

    def array(self, role: str, layer: int | None, kind: str) -> np.ndarray | None:
        if role in _STACKS:
            parts = [self.array(part, layer, kind) for part in _STACKS[role]] if self.fused else [None]
            return None if any(part is None for part in parts) else np.concatenate(parts)
        if role.startswith("mlp.experts."):
            return self.expert(*role.split(".")[2:], layer=layer) if kind == "weight" else None
        prefix = "" if layer is None else f"model.layers.{layer}."
        tensor = self.state.get(f"{prefix}{_NAMES.get(role)}.{kind}")
        return None if tensor is None else tensor.detach().float().numpy()

    def expert(self, number: str, part: str, *, layer: int | None) -> np.ndarray | None:
        """One expert of the 3-D stacks that transformers 5 holds them in."""
        if (part == "gate_up") != self.fused and part != "down":
            return None
        stack = "down_proj" if part == "down" else "gate_up_proj"
        weight = self.state[f"model.layers.{layer}.mlp.experts.{stack}"][int(number)].detach().float().numpy()
        half = weight.shape[0] // 2
        return {"gate": weight[:half], "up": weight[half:]}.get(part, weight)

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        array = self.array(role, layer, kind)
        return None if array is None else DenseRows(array.reshape(len(array), -1), DType.F32)


def tiny(
    model_type: str, seed: int = 0, deviation: float = 0.15, **changes: Any
) -> transformers.PreTrainedModel:
    """A random float32 model of the family, its biases and norms far from their defaults too."""
    sizes = MOE_SIZES if model_type.endswith("_moe") else SIZES
    config = transformers.AutoConfig.for_model(model_type, **(sizes | changes), attn_implementation="eager")
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.randn_like(parameter)
            # Norms are spread around what leaves their input as it is: 1, or 0 where the class adds 1.
            parameter.copy_(parameter.mean() + 0.3 * spread if "norm" in name else deviation * spread)
            if "q_norm" in name and model_type.startswith("gemma4"):
                parameter.mul_(0.25)  # nothing else keeps the scores of its attention small
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn_like(buffer))
            if name.endswith("layer_scalar"):
                buffer.fill_(0.8)
    return model


def decoder_of(
    model: transformers.PreTrainedModel,
    *,
    fused: bool = False,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> Decoder:
    """The same model in the built-in decoder, from its config as transformers saves it."""
    config = DecoderConfig.from_hf(model.config.to_dict() | changes)
    return load_decoder(config, StateDict(model.state_dict(), fused=fused), dtype=dtype)


def tokens(batch: int, length: int, vocab: int = 160, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(seed))
