"""Declares Gemma 3n: four residual streams, a low-rank path beside attention, inputs of each layer.

llama.cpp's graph fixes most of its sizes (src/models/gemma3n.cpp, llama-hparams.h), so every one is checked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.families.gemma4 import SLIDING, kind_of, shares_keys
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import Copy, Facts, GGUFModel, Written, derived, implying, read_by
from qconvert.models.gguf.families.gemma import GEMMA3, two_bases
from qconvert.models.gguf.families.gemma4 import PER_LAYER
from qconvert.models.gguf.metadata import Metadata

# Its first layers keep the largest twentieth of what their gates make (n_layer_sparsity), and its last take
# the keys and values of the 20 layers before them (n_layer_kv_from_start).
_SPARSE, _WITH_KEYS, _SHARE = 10, 20, 0.95
# How many deviations above the mean that twentieth begins, as the graph has it in float32.
_DEVIATIONS = 1.6448533535003662


def _expected_shares(layers: int) -> list[float]:
    return [_SHARE if layer < _SPARSE else 0.0 for layer in range(layers)]


def _shares(facts: Facts) -> list[float]:
    """Returns how much each layer's gates drop; the class's default is none in ten layers or fewer."""
    stated, layers = facts.settings.get("activation_sparsity_pattern"), facts.layers
    if stated is None:
        return _expected_shares(layers) if layers > _SPARSE else [0.0] * layers
    shares = stated if isinstance(stated, list) else [stated] * layers
    return [float(share) for share in shares if isinstance(share, int | float)]


@implying(lambda file: {"activation_sparsity_pattern": _expected_shares(file.layers)})
def known_sparsity(facts: Facts) -> str | None:
    """Refuses gates that drop other shares, or in other layers, than the graph's."""
    if _shares(facts) == _expected_shares(facts.layers):
        return None
    return (
        f"activation_sparsity_pattern is not {_SHARE} in the first {_SPARSE} layers and 0 in the others, as "
        "llama.cpp's gemma3n computes it"
    )


@implying(lambda file: {"num_kv_shared_layers": max(0, file.layers - _WITH_KEYS)})
def known_sharing(facts: Facts) -> str | None:
    """Refuses other layers without keys of their own than those after the first 20."""
    shared = facts.count("num_kv_shared_layers")
    if shared == max(0, facts.layers - _WITH_KEYS):
        return None
    return (
        f"num_kv_shared_layers is {shared} of {facts.layers}, but llama.cpp's gemma3n has {_WITH_KEYS} "
        "layers with keys of their own"
    )


def one_width(facts: Facts) -> str | None:
    """Refuses layers of different inner widths: the loader has one."""
    widths = {dims["intermediate"] for dims in facts.dimensions}
    return None if len(widths) == 1 else "intermediate_size differs between layers; llama.cpp has one"


def _read_widths(file: Metadata) -> Json:
    return {"intermediate_size": list(file.counts("feed_forward_length"))}


@read_by(_read_widths)
def _widths(facts: Facts) -> Iterator[KV]:
    """Writes the inner widths: by layer where the config lists them."""
    widths = [dims["intermediate"] for dims in facts.dimensions]
    if isinstance(facts.settings.get("intermediate_size"), list):
        yield facts.by_layer("feed_forward_length", widths)
    else:
        yield facts.u32("feed_forward_length", widths[0])


def _read_inputs(file: Metadata) -> Json:
    return {"vocab_size_per_layer_input": file.tensors["per_layer_token_embd.weight"].shape[0]}


@read_by(_read_inputs)
def _inputs(facts: Facts) -> Iterator[KV]:
    """Writes the streams, the width of each layer's inputs, and what follows from the graph's sizes."""
    yield facts.u32("altup.active_idx", facts.count("altup_active_idx"))
    yield facts.u32("altup.num_inputs", facts.size("altup_num_inputs"))
    yield facts.u32("embedding_length_per_layer_input", facts.size("hidden_size_per_layer_input"))
    yield facts.u32("attention.shared_kv_layers", facts.count("num_kv_shared_layers"))


@derived
def _by_layer(facts: Facts) -> Iterator[KV]:
    """Writes where each layer's gates begin, and which layers see a window alone."""
    scales = (_DEVIATIONS if share else float("-inf") for share in _shares(facts))
    yield KV.f32s(f"{facts.model.arch}.activation_sparsity_scale", tuple(scales))
    sliding = (kind_of(facts.settings, layer, 5) == SLIDING for layer in range(facts.layers))
    yield facts.flags_by_layer("attention.sliding_window_pattern", sliding)


def _table_rows(facts: Facts) -> Iterator[range]:
    """Yields a row for every token: those without one in the table take the first, as in the class."""
    rows, vocab = facts.dimensions[0]["per_layer_vocab"], facts.dimensions[0]["vocab"]
    yield range(min(rows, vocab))
    yield from (range(1) for _ in range(rows, vocab))


def _never_read(facts: Facts) -> Iterator[Copy]:
    """Yields the keys and values of layers that take others': the loader wants some, the graph reads none."""
    types = [kind_of(facts.settings, layer, 5) for layer in range(facts.layers)]
    for layer in range(facts.layers):
        if shares_keys(facts.settings, layer):
            own = range(facts.layers - facts.count("num_kv_shared_layers"))
            source = max((i for i in own if types[i] == types[layer]), default=0)
            yield from (Copy(role, source, layer) for role in ("attn.k", "attn.v", "attn.k_norm"))


GEMMA3N = GGUFModel(
    "gemma3n",
    keys=(
        *k.SIZES[:3],
        _widths,
        k.head_count,
        k.head_count_kv,
        two_bases,
        k.rms_epsilon,
        k.stated_head_sizes,
    ),
    late=(
        k.optional_number("final_logit_softcapping", "final_logit_softcapping"),
        k.sliding_window,
        _inputs,
        _by_layer,
    ),
    defaults={
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "sliding_window": 512,
        "head_dim": 256,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 15,
        "hidden_size_per_layer_input": 256,
        "altup_num_inputs": 4,
        "altup_active_idx": 0,
        "laurel_rank": 64,
        "final_logit_softcapping": 30.0,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    roles={
        **PER_LAYER,
        "per_layer.table": replace(PER_LAYER["per_layer.table"], rows=_table_rows),
        "streams.in": Written("altup_proj"),
        "streams.out": Written("altup_unembd_proj"),
        "streams.scale": Written("altup_correct_scale"),
        "streams.correction": Written("altup_correct_coef"),
        "streams.prediction": Written("altup_predict_coef"),
        "streams.router": Written("altup_router"),
        "streams.norm": Written("altup_router_norm"),
        "laurel.left": Written("laurel_l"),
        "laurel.right": Written("laurel_r"),
        "laurel.norm": Written("laurel_post_norm"),
    },
    stacks={f"streams.{way}": tuple(f"streams.{way}_{i}" for i in range(3)) for way in ("in", "out")},
    copies=_never_read,
    checks=(
        *GEMMA3.checks[:1],
        c.computes("attention_bias", False),
        c.computes("altup_num_inputs", 4),
        c.computes("altup_active_idx", 0),
        c.computes("altup_correct_scale", True),
        c.computes("laurel_rank", 64),
        c.computes("hidden_size_per_layer_input", 256),
        c.computes("final_logit_softcapping", 30.0),
        c.every_nth_layer_is_full(5),
        known_sparsity,
        known_sharing,
        one_width,
    ),
)

MODELS = {"gemma3n_text": GEMMA3N, "gemma3n": GEMMA3N}
