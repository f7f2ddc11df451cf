"""Lists the model families, one declaration each, in the order of the model's printed structure.

To add a family, copy the nearest one and change what differs. Sources: the families' own classes in
transformers (`modeling_*`), and the modelling files published with models that transformers lacks.
"""

from qconvert.models.families import (
    deepseek,
    deepseek_sparse,
    encoders,
    encoders_newer,
    falcon_h1,
    fused,
    gemma,
    gemma4,
    gpt,
    granite,
    kimi_linear,
    layer_norms,
    lfm2,
    llama,
    llama_relatives,
    minimax,
    nemotron,
    others,
    qwen,
    qwen_hybrid,
    seeing,
    sparse_relatives,
    state_space,
)
from qconvert.models.parameters import Family

FAMILIES: tuple[Family, ...] = (
    *qwen.FAMILIES,
    *qwen_hybrid.FAMILIES,
    *llama.FAMILIES,
    *llama_relatives.FAMILIES,
    *granite.FAMILIES,
    *sparse_relatives.FAMILIES,
    *layer_norms.FAMILIES,
    *lfm2.FAMILIES,
    *falcon_h1.FAMILIES,
    *state_space.FAMILIES,
    *fused.FAMILIES,
    *gemma.FAMILIES,
    *gemma4.FAMILIES,
    *deepseek.FAMILIES,
    *deepseek_sparse.FAMILIES,
    *kimi_linear.FAMILIES,
    *minimax.FAMILIES,
    *nemotron.FAMILIES,
    *gpt.FAMILIES,
    *encoders.FAMILIES,
    *encoders_newer.FAMILIES,
    *others.FAMILIES,
    *seeing.FAMILIES,
)

__all__ = ["FAMILIES"]
