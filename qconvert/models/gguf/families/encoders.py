"""Declares BERT, an encoder for embeddings, and T5, an encoder-decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV
from qconvert.models.gguf import graph_checks as c
from qconvert.models.gguf import keys as k
from qconvert.models.gguf.declaration import NOT_WRITTEN, Facts, GGUFModel, Keys, Written, read_by
from qconvert.models.gguf.metadata import Metadata


def _read_encoder(file: Metadata) -> Json:
    """Reads the number of token types; a GGUF has no pooler."""
    types = file.rows("token_types.weight") if "token_types.weight" in file.tensors else 1
    return {"add_pooling_layer": False, "type_vocab_size": types}


@read_by(_read_encoder)
def sees_everything(facts: Facts) -> Iterator[KV]:
    """Writes that attention is not causal."""
    yield facts.flagged("attention.causal", value=False)


BERT = GGUFModel(
    "bert",
    keys=(*k.SIZES, k.norm_epsilon("layer_norm_eps")),
    late=(sees_everything,),
    defaults={"layer_norm_eps": 1e-12},
    roles={
        "types": Written("token_types"),
        "embed.norm": Written("token_embd_norm"),
        "attn.norm": Written("attn_output_norm"),
        "mlp.norm": Written("layer_output_norm"),
        **dict.fromkeys(
            ("pooler", "head.bias", "head.dense", "head.norm", "lm_head", "pair_head"), NOT_WRITTEN
        ),
    },
    checks=(c.computes("hidden_act", "gelu"), c.computes("position_embedding_type", "absolute")),
)


def t5_roles(stack: str, prefix: str) -> dict[str, Written]:
    """Returns the names of one of T5's stacks: `enc.blk.0.attn_q` and so on."""
    block = prefix + ".blk.{layer}."
    names = {f"attn.{part}": f"attn_{part}" for part in "qkvo"}
    names |= {f"mlp.{part}": f"ffn_{part}" for part in ("up", "gate", "down", "norm")}
    names |= {f"cross.{part}": f"cross_attn_{part}" for part in (*"qkvo", "norm")}
    names |= {"attn.norm": "attn_norm", "positions": "attn_rel_b"}
    return {f"{stack}.{role}": Written(block + name) for role, name in names.items()}


def head_scale(facts: Facts) -> float:
    """Returns the factor of the decoder's output, which the class applies and llama.cpp does not."""
    tied = facts.flag("tie_word_embeddings", default=True)
    return float(facts.size("d_model") ** -0.5) if facts.flag("scale_decoder_outputs", default=tied) else 1.0


def _read_stacks(file: Metadata) -> Json:
    decoder = file.optional("decoder_block_count") or file.layers
    return {"num_layers": file.layers, "num_decoder_layers": decoder}


@read_by(_read_stacks)
def stacks(facts: Facts) -> Iterator[KV]:
    """Writes the numbers of layers of the encoder and of the decoder."""
    for name, layers in zip(("block_count", "decoder_block_count"), facts.architecture.stacks, strict=True):
        yield facts.u32(name, layers)


def _read_mlp(file: Metadata) -> Json:
    gated = "enc.blk.0.ffn_gate.weight" in file.tensors
    return {"feed_forward_proj": "gated-gelu" if gated else "relu", "is_encoder_decoder": True}


_RMS_EPSILON = k.rms_epsilon_of("layer_norm_epsilon")


def no_deeper_decoder(facts: Facts) -> str | None:
    """Refuses a decoder deeper than the encoder: the loader assumes equal depths (as of build b9190)."""
    encoder, decoder = facts.architecture.stacks
    if decoder <= encoder:
        return None
    return (
        f"num_decoder_layers is {decoder}, num_layers {encoder}; llama.cpp does not load a t5 that is deeper "
        "in the decoder than in the encoder"
    )


T5 = GGUFModel(
    "t5",
    keys=(
        k.size("context_length", "n_positions"),
        k.size("embedding_length", "d_model"),
        k.size("feed_forward_length", "d_ff"),
        stacks,
        k.size("attention.head_count", "num_heads"),
        k.size("attention.key_length", "d_kv"),
        k.counted("attention.value_length", lambda facts: facts.size("d_kv")),
        Keys(k.norm_epsilon("layer_norm_epsilon").write, _RMS_EPSILON.read),
        k.size("attention.relative_buckets_count", "relative_attention_num_buckets"),
        Keys(_RMS_EPSILON.write),
        k.count("decoder_start_token_id", "decoder_start_token_id"),
        k.read_only(_read_mlp),
    ),
    defaults={"n_positions": 512, "layer_norm_epsilon": 1e-6, "relative_attention_num_buckets": 32},
    roles={
        **t5_roles("encoder", "enc"),
        **t5_roles("decoder", "dec"),
        "encoder.final_norm": Written("enc.output_norm"),
        "decoder.final_norm": Written("dec.output_norm", "scale", factor=head_scale),
    },
    checks=(
        c.computes("feed_forward_proj", "relu", "gated-gelu"),
        c.computes("relative_attention_max_distance", 128),
        no_deeper_decoder,
    ),
)

MODELS = {
    "bert": BERT,
    "t5": T5,
    "mt5": replace(T5, defaults={**T5.defaults, "feed_forward_proj": "gated-gelu"}),
}
