"""Declares IBM's Granite mixtures, with and without a shared expert, and Granite 4, which has Mamba-2 layers.

Their files hold gate beside up, of all experts of a layer in one stack, and so does the class. Sources:
transformers' `modeling_granitemoe`, `modeling_granitemoeshared`, `modeling_granitemoehybrid`.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import count, optional_int, positive_int
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.models.families import common as c
from qconvert.models.families.llama import LLAMA
from qconvert.models.parameters import Dimensions, Fusion, ParameterTemplate

BLOCK = c.LAYER + "block_sparse_moe."
SHARED = c.LAYER + "shared_mlp."
EXPERTS = (
    c.router(BLOCK + "router.layer"),
    *c.experts(BLOCK + "experts.{expert}.", ("w1", "w3", "w2")),
)
# As files hold them; and as transformers 5 has them in memory.
STACKS = (
    replace(c.EXPERT_STACKS[0], module=BLOCK + "input_linear", suffix=".weight", native=True),
    replace(c.EXPERT_STACKS[1], module=BLOCK + "output_linear", suffix=".weight", native=True),
    replace(c.EXPERT_STACKS[0], module=BLOCK + "experts.gate_up_proj"),
    replace(c.EXPERT_STACKS[1], module=BLOCK + "experts.down_proj"),
)
SHARED_NAMES = ("gate_proj", "up_proj", "output_linear")
SHARED_EXPERT = c.gated_mlp(SHARED, "mlp.shared.", "shared_rows", SHARED_NAMES)
SHARED_GATE_UP = Fusion(
    "mlp.shared.gate_up", SHARED + "input_linear", ("mlp.shared.gate", "mlp.shared.up"), native=True
)

GRANITE_MOE = replace(
    LLAMA,
    name="Granite 3 MoE",
    model_types=("granitemoe",),
    classes=("GraniteMoeForCausalLM",),
    slots=c.decoder(c.BIASED_ATTENTION, EXPERTS),
    dimensions=c.sparse_dimensions(),
    named_by={**c.NAMED_BY, "shared_rows": "shared_intermediate_size"},
    keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    fusions=(c.QKV, *STACKS),
    note="",
)

GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    name="Granite MoE with a shared expert",
    model_types=("granitemoeshared",),
    classes=("GraniteMoeSharedForCausalLM",),
    slots=c.decoder(c.BIASED_ATTENTION, (*EXPERTS, *SHARED_EXPERT)),
    keys={**GRANITE_MOE.keys, "shared_expert_intermediate_size": "shared_intermediate_size"},
    fusions=(c.QKV, *STACKS, SHARED_GATE_UP),
)

MAMBA = c.LAYER + "mamba."
# transformers 5 and the published files have a word of their own for each kind of layer.
_KINDS = {"mamba": False, "linear_attention": False, "attention": True, "full_attention": True}


def attends(config: Json, layer: int) -> bool:
    """Returns whether a layer of Granite 4 has attention; the others have Mamba-2."""
    words = (c.entry(config, key, layer) for key in ("layer_types", "layers_block_type"))
    word = next((each for each in words if each is not None), "mamba")
    if word not in _KINDS:
        raise CorruptCheckpoint(f"config.json: layer_types has no known kind for layer {layer}: {word!r}")
    return _KINDS[word]


def granite4_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns Granite 4's dimensions; without experts what is shared elsewhere is the whole block."""
    attention, sparse = attends(config, layer), count(config, "num_local_experts") > 0
    shared = positive_int(config, "shared_intermediate_size")
    experts = {
        "experts": count(config, "num_local_experts"),
        "expert_rows": positive_int(config, "intermediate_size") if sparse else 0,
        "shared_rows": shared if sparse else 0,
        "intermediate": 0 if sparse else shared,
    }
    return {
        **c.attention_dimensions(config),
        **({} if attention else {"q_rows": 0, "kv_rows": 0}),
        **mamba2_dimensions(config, present=not attention),
        **experts,
    }


def mamba2_dimensions(config: Json, *, present: bool) -> dict[str, int]:
    """Returns the dimensions of a Mamba-2 mixer under the keys of Granite 4; 0 where there is none."""
    inner = (optional_int(config, "mamba_expand") or 2) * positive_int(config, "hidden_size")
    heads = positive_int(config, "mamba_n_heads")
    states = 2 * positive_int(config, "mamba_n_groups") * positive_int(config, "mamba_d_state")
    sizes = {
        "mamba_heads": heads,
        "mamba_rows": inner,
        "conv_rows": inner + states,
        "mamba_in_rows": 2 * inner + states + heads,
        "kernel": positive_int(config, "mamba_d_conv"),
    }
    return sizes if present else dict.fromkeys(sizes, 0)


def mamba2_mixer(module: str, *, bias: bool | str, conv_bias: str) -> tuple[ParameterTemplate, ...]:
    """Returns the templates of a Mamba-2 mixer."""

    def vector(role: str, name: str) -> ParameterTemplate:
        return ParameterTemplate(role, module + name, ("mamba_heads",), "other", suffix="")

    return (
        vector("mamba.dt_bias", "dt_bias"),
        vector("mamba.A_log", "A_log"),
        vector("mamba.D", "D"),
        ParameterTemplate(
            "mamba.conv", module + "conv1d", ("conv_rows", "one", "kernel"), "other", conv_bias
        ),
        c.linear("mamba.in", module + "in_proj", "mamba_in_rows", "hidden", bias=bias),
        c.norm("mamba.norm", module + "norm", "mamba_rows"),
        c.linear("mamba.out", module + "out_proj", "hidden", "mamba_rows", bias=bias),
    )


MAMBA2_NAMES = {
    "mamba_heads": "mamba_n_heads",
    "mamba_rows": "mamba_expand x hidden_size",
    "conv_rows": "mamba_expand x hidden_size + 2 x mamba_n_groups x mamba_d_state",
    "mamba_in_rows": "2 x (mamba_expand x hidden_size + mamba_n_groups x mamba_d_state) + mamba_n_heads",
    "kernel": "mamba_d_conv",
}

GRANITE4 = replace(
    GRANITE_MOE_SHARED,
    name="Granite 4",
    model_types=("granitemoehybrid",),
    classes=("GraniteMoeHybridForCausalLM",),
    slots=c.decoder(
        (*mamba2_mixer(MAMBA, bias="mamba_proj_bias", conv_bias="mamba_conv_bias"), *c.BIASED_ATTENTION),
        (*EXPERTS, *c.gated_mlp(SHARED, names=SHARED_NAMES), *SHARED_EXPERT),
    ),
    dimensions=granite4_dimensions,
    named_by={**GRANITE_MOE_SHARED.named_by, **MAMBA2_NAMES, "intermediate": "shared_intermediate_size"},
    keys={},
    defaults={
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_conv_bias": True,
    },
    fusions=(
        c.QKV,
        *STACKS,
        replace(c.GATE_UP, module=SHARED + "input_linear", native=True),
        SHARED_GATE_UP,
    ),
    scale_pairs=(
        replace(c.ATTN_INPUT, readers=(*c.ATTN_INPUT.readers, "mamba.in")),
        *c.SCALE_PAIRS[1:],
    ),
    note="with layers of Mamba-2, and without any",
)

FAMILIES = (GRANITE_MOE, GRANITE_MOE_SHARED, GRANITE4)
