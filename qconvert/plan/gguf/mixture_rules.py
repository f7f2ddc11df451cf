"""Lists the exceptions of every GGUF mixture, one line for each file type and kind of tensor.

A rule looks at one tensor (`Look`) and names a type, or None for the mixture's base type. Source:
llama_tensor_get_type_impl in llama.cpp's src/llama-quant.cpp (commit 0c1e57098); `plan.gguf.mixture`
applies them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qconvert.core.ggml_types import GGMLType as T


@dataclass(frozen=True, slots=True)
class Look:
    """What a rule may ask: where a tensor stands among `count` of its kind, and what the model is like.

    `shared` says that four or more query heads share a key and value head.
    """

    parameter: int
    count: int
    shared: bool
    imatrix: bool
    falcon: bool
    experts: int

    @property
    def early(self) -> bool:
        """In the first eighth."""
        return self.parameter < self.count // 8

    @property
    def first(self) -> bool:
        """In the first sixteenth."""
        return self.parameter < self.count // 16

    @property
    def middle(self) -> bool:
        """In neither the first nor the last eighth."""
        return not self.early and self.parameter < 7 * self.count // 8

    @property
    def more(self) -> bool:
        """In the first or last eighth, or every third between (use_more_bits)."""
        return not self.middle or (self.parameter - self.count // 8) % 3 == 2


Rule = Callable[[Look], T | None]
Rules = Mapping[str, Rule]


def always(kind: T) -> Rule:
    """A rule that does not look."""
    return lambda _: kind


def where(condition: Callable[[Look], bool], kind: T) -> Rule:
    """A rule for the tensors that meet a condition."""
    return lambda look: kind if condition(look) else None


LOWEST = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M")  # below 3 bits, imatrix only
_UPPER = ("IQ2_S", "IQ2_M")
_EIGHT_EXPERTS = (
    *("Q2_K", "Q3_K_S", "Q3_K_M", "Q4_K_S", "Q4_K_M"),
    *("IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "IQ4_NL", "IQ4_XS"),
)


def _shared(look: Look) -> bool:
    return look.shared


def _low_values(otherwise: T) -> Rule:
    return lambda look: T.Q4_K if look.shared or look.experts >= 4 else otherwise


EMBEDDING: Rules = {
    **dict.fromkeys(LOWEST, always(T.Q2_K)),
    **dict.fromkeys((*_UPPER, "IQ3_XXS"), always(T.IQ3_S)),
    **dict.fromkeys(("TQ1_0", "TQ2_0", "Q2_0"), always(T.Q4_K)),
}
ATTENTION_VALUES: Rules = {
    **dict.fromkeys(LOWEST, _low_values(T.Q2_K)),
    **dict.fromkeys(_UPPER, _low_values(T.IQ3_S)),
    "IQ3_XXS": lambda look: T.Q4_K if look.shared else None if look.imatrix else T.IQ3_S,
    "IQ3_XS": where(_shared, T.Q4_K),
    "IQ3_S": where(_shared, T.Q4_K),
    "IQ3_M": always(T.Q4_K),
    "IQ4_NL": where(_shared, T.Q5_K),
    "IQ4_XS": where(_shared, T.Q5_K),
    "Q2_K": lambda look: T.Q4_K if look.shared else T.Q3_K,
    "Q2_K_S": where(_shared, T.Q4_K),
    "Q3_K_M": lambda look: T.Q5_K if look.parameter < 2 else T.Q4_K,
    "Q3_K_L": always(T.Q5_K),
    "Q4_K_S": where(lambda look: look.parameter < 4, T.Q5_K),
    "Q4_K_M": where(lambda look: look.more, T.Q6_K),
    "Q5_K_M": where(lambda look: look.more, T.Q6_K),
}
ATTENTION_QUERIES: Rules = {"IQ3_XS": always(T.IQ3_XXS), "IQ3_XXS": always(T.IQ2_S)}
ATTENTION_OUTPUT: Rules = {
    **dict.fromkeys(("IQ1_S", "IQ1_M"), always(T.IQ2_XXS)),
    **dict.fromkeys((*_UPPER, "IQ3_XXS"), always(T.IQ3_S)),
    "IQ3_M": always(T.Q4_K),
    "Q2_K": always(T.Q3_K),
    "Q3_K_M": always(T.Q4_K),
    "Q3_K_L": always(T.Q5_K),
}
DOWN: Rules = {
    **dict.fromkeys(LOWEST, where(lambda look: look.early, T.Q2_K)),
    **dict.fromkeys(_UPPER, where(lambda look: look.early, T.IQ3_S)),
    "IQ3_XXS": lambda look: None if look.imatrix else T.Q4_K if look.early else T.Q3_K,
    "IQ3_M": where(lambda look: look.early or (look.experts == 8 and look.more), T.Q4_K),
    "IQ4_NL": where(lambda look: look.early and not look.imatrix, T.Q5_K),
    "IQ4_XS": where(lambda look: look.early and not look.imatrix, T.Q5_K),
    "Q2_K": always(T.Q3_K),
    "Q2_K_S": where(lambda look: look.early, T.Q4_K),
    "Q3_K_M": lambda look: T.Q5_K if look.first else T.Q4_K if look.more or not look.falcon else None,
    "Q3_K_L": lambda look: T.Q4_K if look.falcon else T.Q5_K,
    "Q4_0": where(lambda look: look.early and look.imatrix, T.Q4_1),
    "Q5_0": where(lambda look: look.early and look.imatrix, T.Q5_1),
    "Q4_K_S": where(lambda look: look.early and not look.falcon, T.Q5_K),
    "Q4_K_M": lambda look: (T.Q6_K if look.first or not look.falcon else T.Q5_K) if look.more else None,
    "Q5_K_M": where(lambda look: look.more, T.Q6_K),
}
UP_AND_GATE: Rules = {"IQ3_XS": where(lambda look: look.middle, T.IQ3_XXS)}

# Mixtral: these tensors are small beside eight experts. Other numbers of experts get no help.
EIGHT_EXPERTS_KEYS: Rules = dict.fromkeys(LOWEST, always(T.Q4_K))
EIGHT_EXPERTS_OUTPUT: Rules = dict.fromkeys((*LOWEST, *_EIGHT_EXPERTS), always(T.Q5_K))
FALCON_OUTPUT: Rules = {"Q3_K_L": always(T.Q4_K)}
