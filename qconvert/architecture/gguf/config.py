"""A config.json from the metadata of a GGUF model file: the inverse of `keys`.

Pure. Every number that decides what the model computes comes from a key or from a tensor's shape; a key
that the model needs and the file lacks is an error that names it. What llama.cpp's graphs hard-wire
(norms of expert weights, activations) is written out.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping

from qconvert.errors import CorruptCheckpoint, UnsupportedModel
from qconvert.gguf_types import KV, GGUFTensor
from qconvert.tensors import Json

_CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
_FETCH = "fetch the file again"
_MIXTRAL = ("mixtral", "MixtralForCausalLM")
# What finds the parameters of Llama 3's scaling for a base of the rotary embedding, None if there are none.
FindScaling = Callable[[float], Json | None]


def config_of(
    name: str,
    kv: Mapping[str, KV],
    tensors: Mapping[str, GGUFTensor],
    find_scaling: FindScaling | None,
) -> Json:
    """The config.json of a GGUF model file called `name` in errors.

    `find_scaling` finds what the tensor `rope_freqs.weight` was computed from, where there is one.
    Raises CorruptCheckpoint naming a missing or senseless key, UnsupportedModel for an architecture that
    is not read.
    """
    keys = _Keys(name, kv)
    arch = keys.text("general.architecture")
    if arch not in _CLASSES:
        raise UnsupportedModel(
            f"{name}: general.architecture is {arch!r}, which is not read here",
            f"read: {', '.join(_CLASSES)}",
        )
    keys.prefix = f"{arch}."
    embed = tensors.get("token_embd.weight")
    if embed is None:
        raise CorruptCheckpoint(f"{name}: token_embd.weight is missing", _FETCH)
    heads = keys.count("attention.head_count")
    hidden = keys.count("embedding_length")
    experts = keys.optional("expert_count") or 0
    model_type, class_name = _MIXTRAL if arch == "llama" and experts else _CLASSES[arch]
    return {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": keys.count("feed_forward_length"),
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.optional("attention.head_count_kv") or heads,
        "head_dim": keys.optional("attention.key_length")
        or keys.optional("rope.dimension_count")
        or hidden // heads,
        "max_position_embeddings": keys.count("context_length"),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embed.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        **_biases(model_type, tensors),
        **(_experts(keys, arch, experts, tensors) if experts else {}),
        **_rope(keys, find_scaling),
        **_special_tokens(keys),
    }


class _Keys:
    """The metadata of a file, asked for by key; `prefix` is the architecture's."""

    def __init__(self, file: str, kv: Mapping[str, KV]) -> None:
        self.file = file
        self.kv = kv
        self.prefix = ""

    def text(self, key: str) -> str:
        value = self._value(key)
        if not isinstance(value, str):
            raise CorruptCheckpoint(f"{self.file}: {key} is {_shown(value)}, not text", _FETCH)
        return value

    def count(self, name: str) -> int:
        """A whole number from 1 on."""
        found = self.optional(name)
        if found is None:
            raise self._wrong(name, "missing")
        return found

    def optional(self, name: str) -> int | None:
        value = self._value(self.prefix + name, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise self._wrong(name, f"{_shown(value)}, not a count")
        return value or None

    def number(self, name: str, default: float | None = None) -> float:
        """A positive float32, as the shortest decimal that stands for it."""
        value = self._value(self.prefix + name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise self._wrong(name, "missing" if value is None else f"{_shown(value)}, not a positive number")
        return shortest(value)

    def word(self, name: str) -> str | None:
        value = self._value(self.prefix + name, None)
        return value if isinstance(value, str) else None

    def _value(self, key: str, *default: object) -> object:
        entry = self.kv.get(key)
        if entry is None and not default:
            raise CorruptCheckpoint(f"{self.file}: {key} is missing", _FETCH)
        return entry.value if entry is not None else default[0]

    def _wrong(self, name: str, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.file}: {self.prefix}{name} is {what}", _FETCH)


def shortest(value: float) -> float:
    """The shortest decimal number that a float32 stands for: 1e-06, not 9.999999974752427e-07."""
    packed = struct.pack("<f", value)
    candidates = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((c for c in candidates if struct.pack("<f", c) == packed), float(value))


def _shown(value: object) -> str:
    return f"a list of {len(value)}" if isinstance(value, tuple) else repr(value)[:80]


def _biases(model_type: str, tensors: Mapping[str, GGUFTensor]) -> Json:
    if model_type.startswith("qwen2"):
        return {}  # always on q, k and v
    found: Json = {"attention_bias": "blk.0.attn_q.bias" in tensors}
    return found | ({"mlp_bias": "blk.0.ffn_up.bias" in tensors} if model_type == "llama" else {})


def _experts(keys: _Keys, arch: str, experts: int, tensors: Mapping[str, GGUFTensor]) -> Json:
    per_token = keys.count("expert_used_count")
    if arch == "llama":
        return {"num_local_experts": experts, "num_experts_per_tok": per_token}
    found: Json = {
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": keys.optional("expert_feed_forward_length")
        or _rows(keys, tensors, "blk.0.ffn_up_exps.weight"),
        "norm_topk_prob": arch == "qwen3moe",  # hard-wired in llama.cpp's graphs
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    if arch == "qwen2moe":
        found["shared_expert_intermediate_size"] = keys.optional(
            "expert_shared_feed_forward_length"
        ) or _rows(keys, tensors, "blk.0.ffn_up_shexp.weight")
    return found


def _rows(keys: _Keys, tensors: Mapping[str, GGUFTensor], tensor: str) -> int:
    if tensor not in tensors or len(tensors[tensor].shape) < 2:
        raise CorruptCheckpoint(f"{keys.file}: {tensor} is missing", _FETCH)
    return tensors[tensor].shape[-2]


def _rope(keys: _Keys, find_scaling: FindScaling | None) -> Json:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.word("rope.scaling.type")
    if find_scaling is not None:
        llama3 = find_scaling(theta)
        if llama3 is None:
            raise UnsupportedModel(
                f"{keys.file}: rope_freqs.weight scales frequencies as config.json has no words for",
                "only Llama 3's scaling is read",
            )
        return {"rope_theta": theta, "rope_scaling": llama3}
    if kind in (None, "none"):
        return {"rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f"{keys.file}: {keys.prefix}rope.scaling.type is {kind!r}, which is not read here",
            "known: none, linear, yarn, and llama 3's",
        )
    scaling: Json = {"rope_type": kind, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = keys.count("rope.scaling.original_context_length")
        for name, key in (
            ("extrapolation_factor", "yarn_ext_factor"),
            ("attention_factor", "yarn_attn_factor"),
            ("beta_fast", "yarn_beta_fast"),
            ("beta_slow", "yarn_beta_slow"),
        ):
            if f"{keys.prefix}rope.scaling.{key}" in keys.kv:
                scaling[name] = keys.number(f"rope.scaling.{key}")
    return {"rope_theta": theta, "rope_scaling": scaling}


def _special_tokens(keys: _Keys) -> Json:
    found: Json = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        entry = keys.kv.get(f"tokenizer.ggml.{key}_token_id")
        if entry is not None and isinstance(entry.value, int):
            found[f"{name}_token_id"] = entry.value
    return found
