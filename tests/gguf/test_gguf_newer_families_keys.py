"""Keys of newer families: what llama.cpp's converter wrote for these models, and in which order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from qconvert.core.ggml_types import KV, Scalar
from qconvert.core.numbers import shortest
from qconvert.models import Architecture
from qconvert.models.gguf.families import facts_of
from qconvert.models.gguf.keys import file_keys
from tests.support.newer_families import CONFIGS, sizes_of

# Recorded from convert_hf_to_gguf.py of llama.cpp at commit 0c1e57098 on the models of CONFIGS.
RECORDED = {
    "olmoe": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=4 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-05 expert_count=4 expert_used_count=2 "
    "general.file_type=0",
    "granite-moe": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-06 expert_count=4 expert_used_count=2 "
    "general.file_type=0 vocab_size=320 rope.dimension_count=16 "
    "attention.scale=0.2 embedding_scale=3.0 residual_scale=0.4 logit_scale=2.0",
    "granite-moe-shared": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-06 expert_count=4 expert_used_count=2 "
    "general.file_type=0 vocab_size=320 rope.dimension_count=16 "
    "attention.scale=0.2 embedding_scale=3.0 residual_scale=0.4 logit_scale=2.0 "
    "expert_shared_feed_forward_length=32",
    "granite4": "block_count=3 context_length=1048576 embedding_length=64 "
    "feed_forward_length=96 attention.head_count=4 "
    "attention.head_count_kv=[0,2,0] rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-06 expert_count=4 expert_used_count=2 "
    "general.file_type=0 vocab_size=320 rope.dimension_count=16 "
    "attention.scale=0.2 embedding_scale=3.0 residual_scale=0.4 logit_scale=2.0 "
    "expert_shared_feed_forward_length=48 ssm.conv_kernel=4 ssm.state_size=16 "
    "ssm.group_count=2 ssm.inner_size=128 ssm.time_step_rank=8 "
    "rope.scaling.finetuned=False",
    "granite4-without-experts": "block_count=3 context_length=1048576 embedding_length=64 "
    "feed_forward_length=96 attention.head_count=4 "
    "attention.head_count_kv=[0,2,0] rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-06 expert_count=0 expert_used_count=0 "
    "general.file_type=0 vocab_size=320 rope.dimension_count=16 "
    "attention.scale=0.2 embedding_scale=3.0 residual_scale=0.4 logit_scale=2.0 "
    "expert_shared_feed_forward_length=48 ssm.conv_kernel=4 ssm.state_size=16 "
    "ssm.group_count=2 ssm.inner_size=128 ssm.time_step_rank=8 "
    "rope.scaling.finetuned=False",
    "granite4-attention": "block_count=3 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=[2,2,2] "
    "rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=1e-06 expert_count=4 "
    "expert_used_count=2 general.file_type=0 vocab_size=320 "
    "rope.dimension_count=16 attention.scale=0.2 embedding_scale=3.0 "
    "residual_scale=0.4 logit_scale=2.0 expert_shared_feed_forward_length=48 "
    "ssm.conv_kernel=4 ssm.state_size=16 ssm.group_count=2 ssm.inner_size=128 "
    "ssm.time_step_rank=8 rope.scaling.finetuned=True",
    "granite4-dense": "block_count=3 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=[2,2,2] "
    "rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=1e-06 expert_count=0 "
    "expert_used_count=0 general.file_type=0 vocab_size=320 "
    "rope.dimension_count=16 attention.scale=0.2 embedding_scale=3.0 "
    "residual_scale=0.4 logit_scale=2.0 expert_shared_feed_forward_length=48 "
    "ssm.conv_kernel=4 ssm.state_size=16 ssm.group_count=2 ssm.inner_size=128 "
    "ssm.time_step_rank=8 rope.scaling.finetuned=True",
    "phi": "context_length=128 embedding_length=64 feed_forward_length=256 block_count=2 "
    "attention.head_count=4 attention.head_count_kv=4 "
    "attention.layer_norm_epsilon=1e-05 rope.dimension_count=8 "
    "general.file_type=0",
    "gpt-neox": "context_length=128 embedding_length=64 block_count=2 feed_forward_length=96 "
    "rope.dimension_count=4 attention.head_count=4 use_parallel_residual=True "
    "attention.layer_norm_epsilon=1e-05",
    "starcoder2": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 "
    "attention.layer_norm_epsilon=1e-05 general.file_type=0",
    "stablelm": "context_length=128 embedding_length=64 block_count=2 feed_forward_length=96 "
    "rope.dimension_count=4 attention.head_count=4 attention.head_count_kv=2 "
    "use_parallel_residual=False attention.layer_norm_epsilon=1e-05 "
    "general.file_type=0",
    "exaone4": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-05 general.file_type=0 vocab_size=320",
    "hunyuan": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-05 attention.key_length=32 "
    "attention.value_length=32 general.file_type=0",
    "hunyuan-stretched": "block_count=2 context_length=262144 embedding_length=64 "
    "feed_forward_length=96 attention.head_count=4 attention.head_count_kv=2 "
    "rope.freq_base=244211.06 attention.layer_norm_rms_epsilon=1e-05 "
    "attention.key_length=32 attention.value_length=32 general.file_type=0 "
    "rope.scaling.type=none rope.scaling.factor=1.0 "
    "rope.scaling.original_context_length=262144",
    "hunyuan-moe": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0 "
    "attention.layer_norm_rms_epsilon=1e-05 expert_count=4 "
    "attention.key_length=16 attention.value_length=16 general.file_type=0 "
    "expert_shared_feed_forward_length=96 expert_feed_forward_length=96 "
    "expert_used_count=2 expert_shared_count=1",
    "arcee": "block_count=2 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.scaling.type=yarn "
    "rope.scaling.factor=4.0 rope.scaling.original_context_length=32 "
    "rope.scaling.yarn_beta_fast=32.0 rope.scaling.yarn_beta_slow=1.0 "
    "rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=1e-05 "
    "attention.key_length=32 attention.value_length=32 general.file_type=0 "
    "vocab_size=320 rope.dimension_count=32",
    "ernie4.5-moe": "block_count=3 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=2 rope.freq_base=500000.0 "
    "attention.layer_norm_rms_epsilon=1e-05 general.file_type=0 expert_count=4 "
    "expert_used_count=2 interleave_moe_layer_step=1 leading_dense_block_count=1 "
    "expert_feed_forward_length=32 expert_shared_count=2 "
    "expert_shared_feed_forward_length=48",
    "lfm2": "block_count=4 context_length=128 embedding_length=64 feed_forward_length=256 "
    "attention.head_count=4 attention.head_count_kv=[0,2,0,2] "
    "rope.freq_base=1000000.0 attention.layer_norm_rms_epsilon=1e-05 "
    "general.file_type=0 vocab_size=320 shortconv.l_cache=3",
    "lfm2-moe": "block_count=4 context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 attention.head_count_kv=[0,2,0,2] "
    "rope.freq_base=1000000.0 attention.layer_norm_rms_epsilon=1e-05 "
    "expert_count=4 expert_used_count=2 general.file_type=0 "
    "expert_feed_forward_length=32 leading_dense_block_count=1 "
    "expert_gating_func=2 vocab_size=320 shortconv.l_cache=3",
    "mamba": "context_length=1048576 embedding_length=64 feed_forward_length=0 "
    "attention.head_count=0 block_count=2 ssm.conv_kernel=4 ssm.inner_size=128 "
    "ssm.state_size=16 ssm.time_step_rank=4 "
    "attention.layer_norm_rms_epsilon=1e-05 ssm.dt_b_c_rms=False "
    "general.file_type=0",
    "mamba2": "context_length=1048576 embedding_length=64 feed_forward_length=0 "
    "attention.head_count=0 block_count=2 ssm.conv_kernel=4 ssm.inner_size=128 "
    "ssm.state_size=16 ssm.time_step_rank=8 ssm.group_count=2 "
    "attention.layer_norm_rms_epsilon=1e-05 general.file_type=0",
    "falcon-h1": "context_length=128 embedding_length=64 feed_forward_length=96 "
    "attention.head_count=4 block_count=2 ssm.conv_kernel=4 ssm.inner_size=96 "
    "ssm.state_size=16 ssm.time_step_rank=6 ssm.group_count=2 "
    "attention.layer_norm_rms_epsilon=1e-05 general.file_type=0 vocab_size=320 "
    "attention.head_count_kv=2 attention.key_length=16 attention.value_length=16 "
    "rope.freq_base=10000.0",
}
# Differently on purpose: the width of blocks as the tensors have it (there another config key's, or 4 times
# the hidden size), of shared experts too (there divided by heads); no keys of mixers that a model without
# Mamba does not have, nor the heads of each layer where all have as many.
OURS = {
    "granite4-without-experts": {"feed_forward_length": "48"},
    "granite4-attention": {"attention.head_count_kv": "2"},
    "granite4-dense": {"feed_forward_length": "48", "attention.head_count_kv": "2"},
    "phi": {"feed_forward_length": "96"},
    "ernie4.5-moe": {"expert_shared_feed_forward_length": "64"},
}
LEFT_OUT = {
    "granite4-attention": ("ssm.", "rope.scaling.finetuned"),
    "granite4-dense": ("ssm.", "expert_shared_feed_forward_length"),
}


def spelled(value: Scalar | tuple[Scalar, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(spelled, value))}]"
    return str(shortest(value)) if isinstance(value, float) else str(value)


def written(arch: str, found: tuple[KV, ...]) -> Iterator[tuple[str, str]]:
    for entry in found:
        if entry.key.startswith(f"{arch}."):
            yield entry.key.removeprefix(f"{arch}."), spelled(entry.value)


@pytest.mark.parametrize("name", RECORDED)
def test_keys_and_order_of_the_converter(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(CONFIGS[name][0], **sizes_of(name)).to_dict()
    facts = facts_of(Architecture.of(config))
    assert facts.model.arch == CONFIGS[name][1]
    found = file_keys(facts, file_type=0, general=(), tokenizer=(), requantized=False)
    theirs = dict(entry.split("=") for entry in RECORDED[name].split() if "general." not in entry)
    expected = {
        key: OURS.get(name, {}).get(key, value)
        for key, value in theirs.items()
        if not key.startswith(LEFT_OUT.get(name, ("-",)))
    }
    assert list(written(facts.model.arch, found)) == list(expected.items())


@pytest.mark.parametrize("name", CONFIGS)
def test_every_key_is_one_of_ggufs(name: str) -> None:
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    groups = [group for group in vars(gguf.constants.Keys).values() if isinstance(group, type)]
    known = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
    facts = facts_of(
        Architecture.of(transformers.AutoConfig.for_model(CONFIGS[name][0], **sizes_of(name)).to_dict())
    )
    arch, found = facts.model.arch, file_keys(facts, file_type=0, general=(), tokenizer=(), requantized=False)
    assert arch in gguf.MODEL_ARCH_NAMES.values()
    assert {entry.key.replace(f"{arch}.", "{arch}.", 1) for entry in found} <= known
