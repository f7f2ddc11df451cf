"""Declares Mamba and Mamba-2, which have no attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.state_space import inner_width, time_step_rank
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Facts, GGUFModel, Written, derived
from qconvert.models.gguf.families.mamba2 import Mamba2Sizes, unlimited_steps
from qconvert.models.gguf.metadata import Metadata

# What the converter writes for models of state spaces, which have no context and no heads.
_CONTEXT = k.counted("context_length", lambda facts: 1 << 20)
_NO_WIDTH = k.counted("feed_forward_length", lambda facts: 0)
_NO_HEADS = k.counted("attention.head_count", lambda facts: 0)
_EPSILON = k.rms_epsilon_of("layer_norm_epsilon")


def _inner(facts: Facts) -> int:
    return inner_width(facts.settings)


def _twice_as_wide(facts: Facts) -> str | None:
    """Refuses mixers that are not twice as wide as the model, which the loader does not know."""
    expand = facts.optional("expand") or 2
    return None if expand == 2 else f"expand is {expand}, and llama.cpp's {facts.model.arch} has 2"


def _conv_shape(facts: Facts) -> tuple[int, ...]:
    return _inner(facts), facts.size("conv_kernel")


@derived
def _no_inner_norms(facts: Facts) -> Iterator[KV]:
    """Writes that time steps and states have no norms, as those of Falcon-Mamba do in this graph."""
    yield facts.flagged("ssm.dt_b_c_rms", value=False)


_COMPUTED = (
    c.computes("hidden_act", "silu", "swish"),
    c.computes("use_bias", False),
    c.computes("use_conv_bias", True),
    _twice_as_wide,
)
MAMBA = GGUFModel(
    "mamba",
    keys=(
        _CONTEXT,
        k.embedding_length,
        _NO_WIDTH,
        _NO_HEADS,
        k.block_count,
        k.size("ssm.conv_kernel", "conv_kernel"),
        k.counted("ssm.inner_size", _inner),
        k.size("ssm.state_size", "state_size"),
        k.counted(
            "ssm.time_step_rank",
            lambda facts: time_step_rank(facts.settings),
            lambda file: {"time_step_rank": file.size("ssm.time_step_rank")},
        ),
        _EPSILON,
        _no_inner_norms,
    ),
    defaults={"layer_norm_epsilon": 1e-5},
    roles={
        "norm": Written("attn_norm"),
        "mamba.A_log": Written("ssm_a", "minus_exp", suffix=""),
        "mamba.D": Written("ssm_d", suffix=""),
        "mamba.conv": Written("ssm_conv1d", shape=_conv_shape),
        "mamba.in": Written("ssm_in"),
        "mamba.x": Written("ssm_x"),
        "mamba.dt": Written("ssm_dt"),
        "mamba.out": Written("ssm_out"),
    },
    checks=_COMPUTED,
)


def _read_heads(file: Metadata) -> Json:
    heads = file.size("ssm.time_step_rank")
    return {"num_heads": heads, "head_dim": max(1, file.size("ssm.inner_size") // heads)}


MAMBA2 = replace(
    MAMBA,
    arch="mamba2",
    keys=(
        *MAMBA.keys[:8],
        k.counted("ssm.time_step_rank", lambda facts: facts.size("num_heads"), _read_heads),
        k.size("ssm.group_count", "n_groups"),
        _EPSILON,
    ),
    roles={
        "norm": Written("attn_norm"),
        **Mamba2Sizes(
            heads="num_heads",
            groups="n_groups",
            state="state_size",
            kernel="conv_kernel",
            inner=_inner,
            inner_name="expand x hidden_size",
        ).roles(),
    },
    checks=(*_COMPUTED, unlimited_steps),
)

MODELS = {"mamba": MAMBA, "mamba2": MAMBA2}
