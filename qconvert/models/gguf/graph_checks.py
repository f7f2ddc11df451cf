"""Checks what llama.cpp's graphs compute regardless of config.json.

A failed check is a reason to refuse a model; the same facts are written to the config of a file read back.
"""

from __future__ import annotations

from qconvert.models.gguf.declaration import Check, Facts, implying
from qconvert.models.gguf.keys import head_size


def computes(key: str, *values: object) -> Check:
    """Checks that the config key has one of these values of the graph; the first is the default."""

    @implying(lambda file: {key: values[0]})
    def check(facts: Facts) -> str | None:
        found = facts.settings.get(key, values[0])
        if found in values:
            return None
        return (
            f"{key} is {_shown(found)}, but llama.cpp's {facts.model.arch} computes "
            f"{' or '.join(map(_shown, values))}"
        )

    return check


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) or value is None else repr(value)[:80]


def normalises_experts(value: bool) -> Check:
    """Checks whether the weights of the chosen experts are normalised, as the graph does or does not."""

    @implying(lambda file: {"norm_topk_prob": value})
    def check(facts: Facts) -> str | None:
        stated = facts.flag("norm_topk_prob")
        if stated == value:
            return None
        return (
            f"norm_topk_prob is {str(stated).lower()}, but llama.cpp's {facts.model.arch} "
            f"{'always' if value else 'never'} normalises the chosen experts' weights"
        )

    return check


@implying(lambda file: {"decoder_sparse_step": 1, "mlp_only_layers": []})
def experts_everywhere(facts: Facts) -> str | None:
    """Refuses layers without experts: the graph has experts in every layer."""
    if not facts.settings.get("mlp_only_layers") and facts.optional("decoder_sparse_step") in (None, 1):
        return None
    return f"some layers have no experts, which llama.cpp's {facts.model.arch} does not know"


def square_attention(facts: Facts) -> str | None:
    """Refuses an output projection that is not square: the loader takes it for a square matrix."""
    heads, size, hidden = (
        facts.size("num_attention_heads"),
        head_size(facts.settings),
        facts.size("hidden_size"),
    )
    if heads * size == hidden:
        return None
    return f"{heads} heads of {size} are not the hidden {hidden} that llama.cpp's {facts.model.arch} expects"


def every_nth_layer_is_full(step: int, other: str = "sliding_attention") -> Check:
    """Checks for a sliding window, or the `other` attention, in all layers but every `step`-th."""

    def pattern(layers: int) -> list[str]:
        return [other if (i + 1) % step else "full_attention" for i in range(layers)]

    @implying(lambda file: {"layer_types": pattern(file.layers)})
    def check(facts: Facts) -> str | None:
        types = facts.settings.get("layer_types")
        if types is None or types == pattern(facts.layers):
            return None
        return f"layer_types is not the pattern of llama.cpp's {facts.model.arch}: every {step}th layer full"

    return check


def window_left_out(facts: Facts) -> str | None:
    """Refuses a sliding window of the class: the graph attends to everything."""
    window, context = facts.count("sliding_window"), facts.optional("max_position_embeddings") or 0
    if not 0 < window < context or not facts.flag("use_sliding_window", default=True):
        return None
    return (
        f"sliding_window is {window}, which llama.cpp's {facts.model.arch} leaves out: "
        "texts of more tokens are computed otherwise there"
    )
