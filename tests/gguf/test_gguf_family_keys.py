"""Keys of every family: what llama.cpp's converter wrote for these configs, and gguf's list of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from qconvert.core.ggml_types import KV
from qconvert.core.numbers import shortest
from qconvert.models import Architecture
from qconvert.models.gguf.families import facts_of
from qconvert.models.gguf.keys import file_keys
from tests.gguf.test_gguf_families import CONFIGS
from tests.support.gguf_models import SIZES

# Recorded from convert_hf_to_gguf.py of llama.cpp at commit 0c1e57098 on the models of CONFIGS.
# Differently on purpose: GLM's epsilon (there always 1e-5), the contexts of GLM (there the hidden size) and
# Falcon (there 2048), GPT-2's n_inner (there ignored).
RECORDED = {
    "olmo": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 general.file_type=0 "
    "attention.layer_norm_epsilon=1e-05 attention.clamp_kqv=1.5",
    "phi3-long": "rope.scaling.attn_factor=1.118034 context_length=1024 "
    "rope.scaling.original_context_length=256 embedding_length=64 feed_forward_length=96 block_count=2 "
    "attention.head_count=4 attention.head_count_kv=2 attention.layer_norm_rms_epsilon=1e-05 "
    "rope.dimension_count=16 rope.freq_base=10000.0 general.file_type=0 attention.sliding_window=0",
    "gemma": "context_length=128 embedding_length=64 block_count=2 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 attention.layer_norm_rms_epsilon=1e-06 "
    "attention.key_length=32 attention.value_length=32 general.file_type=0",
    "gemma2": "context_length=128 embedding_length=64 block_count=2 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 attention.layer_norm_rms_epsilon=1e-06 "
    "attention.key_length=32 attention.value_length=32 general.file_type=0 attn_logit_softcapping=50.0 "
    "final_logit_softcapping=30.0 attention.sliding_window=8",
    "gemma3": "block_count=7 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.scaling.type=linear rope.scaling.factor=4.0 "
    "rope.freq_base=1000000.0 rope.freq_base_swa=10000.0 attention.layer_norm_rms_epsilon=1e-06 "
    "attention.key_length=32 attention.value_length=32 general.file_type=0 attention.sliding_window=8",
    "command-r": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=500000.0 "
    "attention.layer_norm_epsilon=1e-05 general.file_type=0 logit_scale=0.5 rope.scaling.type=none",
    "glm4": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1.5625e-07 attention.key_length=32 attention.value_length=32 "
    "general.file_type=0 rope.dimension_count=16",
    "gpt2": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=256 "
    "attention.head_count=4 attention.layer_norm_epsilon=1e-05 general.file_type=0",
    "falcon-40b": "context_length=2048 tensor_data_layout=jploski embedding_length=64 "
    "feed_forward_length=256 block_count=2 attention.head_count=4 attention.head_count_kv=2 "
    "attention.layer_norm_epsilon=1e-05 general.file_type=0",
}
ALIKE = {"gpt2": {"n_inner": None}, "falcon-40b": {"max_position_embeddings": 2048}}


def keys(name: str, **changes: Any) -> tuple[str, tuple[KV, ...]]:
    """llama.cpp's name of a family, and the keys of its config in CONFIGS."""
    transformers = pytest.importorskip("transformers")
    class_name, sizes = CONFIGS[name]
    config = {**({} if "n_embd" in sizes else SIZES), **sizes, **changes}
    facts = facts_of(Architecture.of(getattr(transformers, f"{class_name}Config")(**config).to_dict()))
    found = file_keys(facts, file_type=0, general=(), tokenizer=(), requantized=False)
    return facts.model.arch, found


def spelled(arch: str, found: tuple[KV, ...]) -> Iterator[str]:
    for entry in found:
        value = shortest(entry.value) if isinstance(entry.value, float) else entry.value
        yield f"{entry.key.removeprefix(f'{arch}.')}={value}"


@pytest.mark.parametrize("name", RECORDED)
def test_keys_and_order_of_the_converter(name: str) -> None:
    arch, found = keys(name, **ALIKE.get(name, {}))
    (architecture, kind, *model), version = found[:-1], found[-1]
    assert (architecture.value, kind.value, version.value) == (arch, "model", 2)
    assert list(spelled(arch, tuple(model))) == RECORDED[name].split()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_one_of_ggufs(name: str) -> None:
    gguf = pytest.importorskip("gguf")
    groups = [group for group in vars(gguf.constants.Keys).values() if isinstance(group, type)]
    known = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    arch, found = keys(name)
    assert arch in gguf.MODEL_ARCH_NAMES.values()
    assert {entry.key.replace(f"{arch}.", "{arch}.", 1) for entry in found} <= known
