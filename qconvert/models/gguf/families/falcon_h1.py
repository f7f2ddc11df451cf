"""Declares Falcon-H1, whose many multipliers are in the weights of its file."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families.falcon_h1 import inner_width
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, derived, implying, positive, read_by
from qconvert.models.gguf.families.llama import SILU
from qconvert.models.gguf.families.mamba2 import Mamba2Sizes, unlimited_steps
from qconvert.models.gguf.metadata import Metadata

_LISTS = {"mlp_multipliers": 2, "ssm_multipliers": 5}
_NUMBERS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "ssm_in_multiplier"),
    *("ssm_out_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
)


def _listed(facts: Facts, key: str) -> list[float]:
    values = facts.settings.get(key) or [1.0] * _LISTS[key]
    if not isinstance(values, list) or len(values) != _LISTS[key]:
        raise CorruptCheckpoint(f"config.json: {key} is not a list of {_LISTS[key]} numbers")
    numbers = {f"{key}[{i}]": value for i, value in enumerate(values)}
    return [positive(numbers, name) for name in numbers]


def _product(*keys: str) -> Callable[[Facts], float]:
    def factor(facts: Facts) -> float:
        made = 1.0
        for key in keys:
            made *= facts.number(key)
        return made

    return factor


def _of_mlp(number: int) -> Callable[[Facts], float]:
    return lambda facts: _listed(facts, "mlp_multipliers")[number]


def _segments(facts: Facts) -> tuple[tuple[int, float], ...]:
    """The rows that make z, x, B, C and the time steps, each with its own factor."""
    inner, states = _inner(facts), facts.size("mamba_n_groups") * facts.size("mamba_d_state")
    rows = (inner, inner, states, states, facts.size("mamba_n_heads"))
    into = facts.number("ssm_in_multiplier")
    factors = (into * own for own in _listed(facts, "ssm_multipliers"))
    return tuple(zip(rows, factors, strict=True))


def _inner(facts: Facts) -> int:
    return inner_width(facts.settings)


def _scaled(*keys: str) -> Written:
    return Written(change="scale", factor=_product(*keys))


@implying(lambda file: {**dict.fromkeys(_NUMBERS, 1.0), **{k: [1.0] * n for k, n in _LISTS.items()}})
def _one_table(facts: Facts) -> str | None:
    """Refuses one table for the embedding and the head, where they are multiplied by different numbers."""
    head, table = facts.number("lm_head_multiplier"), facts.number("embedding_multiplier")
    if not facts.architecture.tied or head == table:
        return None
    return (
        f"tie_word_embeddings is true, lm_head_multiplier {head} and embedding_multiplier {table}; "
        "llama.cpp's falcon-h1 has one table for both"
    )


def _norms_after_gates(facts: Facts) -> str | None:
    """Refuses norms before the gate of a mixer: the graph has them behind it."""
    if not facts.flag("mamba_rms_norm") or not facts.flag("mamba_norm_before_gate", default=True):
        return None
    return "mamba_norm_before_gate is true, but llama.cpp's falcon-h1 has the norm behind the gate"


def _read_mixer(file: Metadata) -> Json:
    inner, heads = file.size("ssm.inner_size"), file.size("ssm.time_step_rank")
    normed = "blk.0.ssm_norm.weight" in file.tensors
    return {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_rms_norm": normed,
        "mamba_norm_before_gate": False,
    }


@derived
def _head_sizes(facts: Facts) -> Iterator[KV]:
    yield from k.stated_head_sizes(facts)


@read_by(lambda file: {"head_dim": file.head_size})
def _sizes_of_heads(facts: Facts) -> Iterator[KV]:
    yield from _head_sizes(facts)


FALCON_H1 = GGUFModel(
    "falcon-h1",
    keys=(
        k.context_length,
        k.embedding_length,
        k.feed_forward_length,
        k.head_count,
        k.block_count,
        k.size("ssm.conv_kernel", "mamba_d_conv"),
        k.counted("ssm.inner_size", _inner),
        k.size("ssm.state_size", "mamba_d_state"),
        k.counted("ssm.time_step_rank", lambda facts: facts.size("mamba_n_heads"), _read_mixer),
        k.size("ssm.group_count", "mamba_n_groups"),
        k.rms_epsilon,
    ),
    late=(k.vocab_size, k.head_count_kv, _sizes_of_heads, k.rope_kinds("default")),
    defaults={
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        **dict.fromkeys(_NUMBERS, 1.0),
    },
    roles={
        **Mamba2Sizes(
            heads="mamba_n_heads",
            groups="mamba_n_groups",
            state="mamba_d_state",
            kernel="mamba_d_conv",
            inner=_inner,
            inner_name="mamba_d_ssm",
        ).roles(),
        "embed": _scaled("embedding_multiplier"),
        "lm_head": _scaled("lm_head_multiplier"),
        "attn.q": _scaled("attention_in_multiplier"),
        "attn.k": _scaled("key_multiplier", "attention_in_multiplier"),
        "attn.v": _scaled("attention_in_multiplier"),
        "attn.o": _scaled("attention_out_multiplier"),
        "mlp.gate": Written(change="scale", factor=_of_mlp(0)),
        "mlp.down": Written(change="scale", factor=_of_mlp(1)),
        "mlp.norm": Written("ffn_norm", suffix=""),
        "mamba.in": Written("ssm_in", "scale", segments=_segments),
        "mamba.out": Written("ssm_out", "scale", factor=_product("ssm_out_multiplier")),
    },
    checks=(
        SILU,
        c.computes("attention_bias", False),
        c.computes("mlp_bias", False),
        c.computes("mamba_proj_bias", False),
        c.computes("projectors_bias", False),
        unlimited_steps,
        _norms_after_gates,
        _one_table,
    ),
)

MODELS = {"falcon_h1": FALCON_H1}
