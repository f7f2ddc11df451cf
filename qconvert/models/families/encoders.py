"""Declares BERT, an encoder, and T5, an encoder-decoder.

Sources: transformers' `modeling_bert` and `modeling_t5`.
"""

from __future__ import annotations

from qconvert.core.config_json import flag, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.parameters import Dimensions, Family, ParameterTemplate

BERT_LAYER = "bert.encoder.layer.{layer}."
EMBEDDINGS = "bert.embeddings."
BERT_SIZES = {
    "vocab": "vocab_size",
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "positions": "max_position_embeddings",
    "types": "type_vocab_size",
}

_WITHOUT_POOLER = ("BertForMaskedLM", "BertForTokenClassification", "BertForQuestionAnswering")


def bert_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns BERT's dimensions, and which of the two heads the class in `architectures` has.

    `add_pooling_layer`, an argument of that class, is false for a model without the pooling layer.
    """
    classes = config.get("architectures") or ["BertModel"]
    masked = any(name in ("BertForMaskedLM", "BertForPreTraining") for name in classes)
    return {
        **{name: positive_int(config, key) for name, key in BERT_SIZES.items()},
        "two": 2,
        "masked_head": masked,
        "pooler": not all(name in _WITHOUT_POOLER for name in classes)
        and flag(config, "add_pooling_layer", default=True),
        "pair_head": "BertForPreTraining" in classes,
    }


BERT = Family(
    name="BERT",
    model_types=("bert",),
    classes=("BertModel", "BertForMaskedLM", "BertForPreTraining"),
    slots=(
        c.embedding(EMBEDDINGS + "word_embeddings"),
        ParameterTemplate("positions", EMBEDDINGS + "position_embeddings", ("positions", "hidden"), "other"),
        ParameterTemplate("types", EMBEDDINGS + "token_type_embeddings", ("types", "hidden"), "other"),
        c.norm("embed.norm", EMBEDDINGS + "LayerNorm", bias=True),
        c.linear("attn.q", BERT_LAYER + "attention.self.query", "hidden", "hidden", bias=True),
        c.linear("attn.k", BERT_LAYER + "attention.self.key", "hidden", "hidden", bias=True),
        c.linear("attn.v", BERT_LAYER + "attention.self.value", "hidden", "hidden", bias=True),
        c.linear("attn.o", BERT_LAYER + "attention.output.dense", "hidden", "hidden", bias=True),
        c.norm("attn.norm", BERT_LAYER + "attention.output.LayerNorm", bias=True),
        c.linear("mlp.up", BERT_LAYER + "intermediate.dense", "intermediate", "hidden", bias=True),
        c.linear("mlp.down", BERT_LAYER + "output.dense", "hidden", "intermediate", bias=True),
        c.norm("mlp.norm", BERT_LAYER + "output.LayerNorm", bias=True),
        ParameterTemplate("pooler", "bert.pooler.dense", ("hidden", "hidden"), "other", True, "pooler"),
        ParameterTemplate(
            "head.bias", "cls.predictions", ("vocab",), "bias", only_if="masked_head", suffix=".bias"
        ),
        ParameterTemplate(
            "head.dense",
            "cls.predictions.transform.dense",
            ("hidden", "hidden"),
            "other",
            True,
            "masked_head",
        ),
        c.norm("head.norm", "cls.predictions.transform.LayerNorm", bias=True, only_if="masked_head"),
        ParameterTemplate("lm_head", "cls.predictions.decoder", ("vocab", "hidden"), only_if="masked_head"),
        ParameterTemplate("pair_head", "cls.seq_relationship", ("two", "hidden"), "other", True, "pair_head"),
    ),
    dimensions=bert_dimensions,
    named_by=BERT_SIZES,
    defaults={"tie_word_embeddings": True, "type_vocab_size": 2},
    spellings=({"bert.": ""}, {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}),
    ignored=(r"(bert\.)?embeddings\.position_ids", r"cls\.predictions\.decoder\.bias"),
    carried={r"(bert\.)?pooler\..*": "pooler", r"cls\..*": "pretraining heads"},
)


def t5_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns T5's dimensions; only the first layer of each stack has the table of relative positions."""
    inner, heads = positive_int(config, "d_ff"), positive_int(config, "num_heads")
    gated = str(config.get("feed_forward_proj", "relu")).startswith("gated-")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": positive_int(config, "d_model"),
        "rows": heads * positive_int(config, "d_kv"),
        "inner": inner,
        "gated_inner": inner if gated else 0,
        "plain_inner": 0 if gated else inner,
        "heads": heads,
        "buckets": 0 if layer else positive_int(config, "relative_attention_num_buckets"),
    }


def t5_attention(role: str, module: str) -> tuple[ParameterTemplate, ...]:
    """Returns the four projections of an attention block."""
    return (
        c.linear(f"{role}.q", module + "q", "rows", "hidden"),
        c.linear(f"{role}.k", module + "k", "rows", "hidden"),
        c.linear(f"{role}.v", module + "v", "rows", "hidden"),
        c.linear(f"{role}.o", module + "o", "hidden", "rows"),
    )


def t5_mlp(role: str, layer: str) -> tuple[ParameterTemplate, ...]:
    """Returns a feed-forward block, gated (T5 1.1) or not, and its norm."""
    module = layer + "DenseReluDense."
    return (
        c.linear(f"{role}.up", module + "wi", "plain_inner", "hidden"),
        c.linear(f"{role}.gate", module + "wi_0", "gated_inner", "hidden"),
        c.linear(f"{role}.up", module + "wi_1", "gated_inner", "hidden"),
        c.linear(f"{role}.down", module + "wo", "hidden", "inner"),
        c.norm(f"{role}.norm", layer + "layer_norm"),
    )


def t5_self_attention(stack: str) -> tuple[ParameterTemplate, ...]:
    """Returns self-attention with its table of relative positions and its norm."""
    layer = stack + ".block.{layer}.layer.0."
    return (
        *t5_attention(f"{stack}.attn", layer + "SelfAttention."),
        ParameterTemplate(
            f"{stack}.positions",
            layer + "SelfAttention.relative_attention_bias",
            ("buckets", "heads"),
            "other",
        ),
        c.norm(f"{stack}.attn.norm", layer + "layer_norm"),
    )


T5 = Family(
    name="T5",
    model_types=("t5", "mt5"),
    classes=("T5ForConditionalGeneration", "MT5ForConditionalGeneration"),
    slots=(
        c.embedding("shared"),
        *t5_self_attention("encoder"),
        *t5_mlp("encoder.mlp", "encoder.block.{layer}.layer.1."),
        c.norm("encoder.final_norm", "encoder.final_layer_norm"),
        *t5_self_attention("decoder"),
        *t5_attention("decoder.cross", "decoder.block.{layer}.layer.1.EncDecAttention."),
        c.norm("decoder.cross.norm", "decoder.block.{layer}.layer.1.layer_norm"),
        *t5_mlp("decoder.mlp", "decoder.block.{layer}.layer.2."),
        c.norm("decoder.final_norm", "decoder.final_layer_norm"),
        c.head("lm_head"),
    ),
    dimensions=t5_dimensions,
    named_by={
        "vocab": "vocab_size",
        "hidden": "d_model",
        "rows": "num_heads x d_kv",
        "inner": "d_ff",
        "gated_inner": "d_ff",
        "plain_inner": "d_ff",
        "heads": "num_heads",
        "buckets": "relative_attention_num_buckets",
    },
    layers=("num_layers", "num_decoder_layers"),
    defaults={"tie_word_embeddings": True, "relative_attention_num_buckets": 32},
    ignored=(r"(en|de)coder\.embed_tokens\.weight",),
)

FAMILIES = (BERT, T5)
