"""Maps roles to tensor names of GGUF files.

One table serves most families: GGUF names a tensor by its function, not by who trained it. A family's own
names are in its declaration (`families`). Source: TENSOR_NAMES in gguf-py's constants.py.
"""

from __future__ import annotations

from qconvert.errors import UnsupportedModel
from qconvert.models.gguf.declaration import Written

GLOBAL = {
    "embed": "token_embd",
    "positions": "position_embd",
    "lm_head": "output",
    "final_norm": "output_norm",
}
PER_LAYER = {
    "attn.norm": "attn_norm",
    "attn.q": "attn_q",
    "attn.k": "attn_k",
    "attn.v": "attn_v",
    "attn.qkv": "attn_qkv",
    "attn.o": "attn_output",
    "attn.post_norm": "post_attention_norm",
    "attn.q_a": "attn_q_a",
    "attn.q_a_norm": "attn_q_a_norm",
    "attn.q_b": "attn_q_b",
    "attn.kv_a": "attn_kv_a_mqa",
    "attn.kv_a_norm": "attn_kv_a_norm",
    "attn.sinks": "attn_sinks",
    "attn.q_norm": "attn_q_norm",
    "attn.k_norm": "attn_k_norm",
    "mlp.norm": "ffn_norm",
    "mlp.post_norm": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate": "ffn_gate_exps",
    "mlp.experts.up": "ffn_up_exps",
    "mlp.experts.gate_up": "ffn_gate_up_exps",
    "mlp.experts.down": "ffn_down_exps",
    "mlp.shared.gate": "ffn_gate_shexp",
    "mlp.shared.up": "ffn_up_shexp",
    "mlp.shared.down": "ffn_down_shexp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
}
ROPE_FREQS = "rope_freqs.weight"
# The suffix of the factor of a module's NVFP4 weight (`conversion/base.py`: _repack_nvfp4).
FACTOR = "scale"


def gguf_name(role: str, layer: int | None, part: str = "weight", written: Written | None = None) -> str:
    """Returns the GGUF name of a role's tensor, as `written` where the family has its own name.

    All experts of a layer share one tensor. Raises UnsupportedModel for a role without a name, such as the
    dense `mlp.gate_up`, which llama.cpp wants as two.
    """
    if written is not None and written.base is not None:
        stem = written.base if layer is None or "{layer}" in written.base else f"blk.{layer}.{written.base}"
        return stem.format(layer=layer) + (f".{part}" if written.suffix is None else written.suffix)
    if layer is None and role in GLOBAL:
        return f"{GLOBAL[role]}.{part}"
    if layer is not None and role in PER_LAYER:
        return f"blk.{layer}.{PER_LAYER[role]}.{part}"
    where = "" if layer is None else f" of layer {layer}"
    raise UnsupportedModel(
        f"{role}{where}: GGUF has no name for it", "take fused tensors apart first, with `qconvert unfuse`"
    )
