"""Lists the model families, one declaration each, in the order of the model's printed structure.

To add a family, copy the nearest one and change what differs. Sources: the families' own classes in
transformers (`modeling_*`), and the modelling files published with models that transformers lacks.
"""

from qconvert.models.families import deepseek, encoders, fused, gemma, gpt, llama, others, qwen, qwen_hybrid
from qconvert.models.parameters import Family

FAMILIES: tuple[Family, ...] = (
    *qwen.FAMILIES,
    *qwen_hybrid.FAMILIES,
    *llama.FAMILIES,
    *fused.FAMILIES,
    *gemma.FAMILIES,
    *deepseek.FAMILIES,
    *gpt.FAMILIES,
    *encoders.FAMILIES,
    *others.FAMILIES,
)

__all__ = ["FAMILIES"]
