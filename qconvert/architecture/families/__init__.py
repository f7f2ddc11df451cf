"""The catalogue: one declaration per model family, in the order of the model's printed structure.

To add a family, copy the nearest one and change what differs. Sources: the families' own classes
in transformers (`modeling_*`), and the modelling files that came with models it does not have.
"""

from qconvert.architecture.families import llama, qwen
from qconvert.architecture.slots import Family

FAMILIES: tuple[Family, ...] = (*qwen.FAMILIES, *llama.FAMILIES)

__all__ = ["FAMILIES"]
