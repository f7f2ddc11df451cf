"""Declares encoders after BERT: XLM-RoBERTa and RoBERTa, which are built like it, ModernBERT and Nomic's.

Sources: transformers' `modeling_xlm_roberta`, `modeling_roberta`, `modeling_modernbert` and
`modeling_nomic_bert`, its conversion of names, and the config published with nomic-embed-text.
"""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.config_json import flag, positive_int
from qconvert.core.dtypes import Json
from qconvert.models.families import common as c
from qconvert.models.families.encoders import BERT
from qconvert.models.parameters import Dimensions, Family, Fusion, ParameterTemplate

_POOLED = ("RobertaModel", "XLMRobertaModel")


def roberta_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns RoBERTa's dimensions, and whether it has a head over the vocabulary, and a pooling layer."""
    classes = config.get("architectures") or ["RobertaModel"]
    pooled = any(name in _POOLED for name in classes) and flag(config, "add_pooling_layer", default=True)
    sizes = {name: positive_int(config, key) for name, key in BERT.named_by.items()}
    return {**sizes, "masked_head": not any(name in _POOLED for name in classes), "pooler": pooled}


def _renamed(slot: ParameterTemplate) -> ParameterTemplate:
    return replace(slot, module=slot.module.replace("bert.", "roberta.", 1))


_HEAD = (
    ParameterTemplate("head.bias", "lm_head", ("vocab",), "bias", only_if="masked_head", suffix=".bias"),
    ParameterTemplate("head.dense", "lm_head.dense", ("hidden", "hidden"), "other", True, "masked_head"),
    c.norm("head.norm", "lm_head.layer_norm", bias=True, only_if="masked_head"),
    ParameterTemplate("lm_head", "lm_head.decoder", ("vocab", "hidden"), only_if="masked_head"),
)
_BODY = tuple(_renamed(slot) for slot in BERT.slots if slot.module.startswith("bert."))
XLM_ROBERTA = replace(
    BERT,
    name="XLM-RoBERTa, RoBERTa",
    model_types=("xlm-roberta", "roberta"),
    classes=("XLMRobertaModel", "RobertaModel", "XLMRobertaForMaskedLM", "RobertaForMaskedLM"),
    slots=(*_BODY, *_HEAD),
    dimensions=roberta_dimensions,
    defaults={"tie_word_embeddings": True, "type_vocab_size": 2},
    spellings=({"roberta.": ""},),
    ignored=(r"(roberta\.)?embeddings\.position_ids", r"lm_head\.decoder\.bias"),
    carried={r"(roberta\.)?pooler\..*": "pooler", r"(lm_head|classifier)\..*": "the head of another task"},
)

LAYER = "model.layers.{layer}."


def modern_bert_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns ModernBERT's dimensions; attention in the first layer reads the embeddings' norm."""
    classes = config.get("architectures") or ["ModernBertModel"]
    hidden = positive_int(config, "hidden_size")
    return {
        "vocab": positive_int(config, "vocab_size"),
        "hidden": hidden,
        "intermediate": positive_int(config, "intermediate_size"),
        "later": layer > 0,
        "masked_head": "ModernBertForMaskedLM" in classes,
    }


MODERN_BERT = Family(
    name="ModernBERT",
    model_types=("modernbert",),
    classes=("ModernBertModel", "ModernBertForMaskedLM"),
    slots=(
        c.embedding("model.embeddings.tok_embeddings"),
        c.norm("embed.norm", "model.embeddings.norm"),
        c.norm("attn.norm", LAYER + "attn_norm", only_if="later"),
        *(
            c.linear(f"attn.{part}", f"{LAYER}attn.{part}_proj", "hidden", "hidden", bias="attention_bias")
            for part in "qkv"
        ),
        c.linear("attn.o", LAYER + "attn.Wo", "hidden", "hidden", bias="attention_bias"),
        c.norm("mlp.norm", LAYER + "mlp_norm"),
        *c.gated_mlp(LAYER + "mlp.", names=("gate_proj", "up_proj", "Wo"), bias="mlp_bias"),
        c.norm("final_norm", "model.final_norm"),
        ParameterTemplate(
            "head.dense", "head.dense", ("hidden", "hidden"), "other", "classifier_bias", "masked_head"
        ),
        c.norm("head.norm", "head.norm", only_if="masked_head"),
        ParameterTemplate("head.bias", "decoder", ("vocab",), "bias", only_if="masked_head", suffix=".bias"),
        ParameterTemplate("lm_head", "decoder", ("vocab", "hidden"), only_if="masked_head"),
    ),
    dimensions=modern_bert_dimensions,
    named_by=c.NAMED_BY,
    defaults={"tie_word_embeddings": True},
    fusions=(
        Fusion("attn.qkv", LAYER + "attn.Wqkv", ("attn.q", "attn.k", "attn.v"), native=True),
        Fusion("mlp.gate_up", LAYER + "mlp.Wi", ("mlp.gate", "mlp.up"), native=True),
    ),
    spellings=({"model.": ""},),
    carried={r"(head|decoder|classifier|score)\..*": "the head of another task"},
)

NOMIC_LAYER = "encoder.layers.{layer}."


def nomic_dimensions(config: Json, layer: int) -> Dimensions:
    """Returns the dimensions of Nomic's BERT."""
    return {name: positive_int(config, key) for name, key in NOMIC_SIZES.items()}


NOMIC_SIZES = {name: key for name, key in BERT.named_by.items() if name != "positions"}
NOMIC_BERT = Family(
    name="Nomic Embed Text",
    model_types=("nomic_bert",),
    classes=("NomicBertModel",),
    slots=(
        c.embedding("embeddings.word_embeddings"),
        ParameterTemplate("types", "embeddings.token_type_embeddings", ("types", "hidden"), "other"),
        c.norm("embed.norm", "emb_ln", bias=True),
        *(c.linear(f"attn.{part}", f"{NOMIC_LAYER}attn.{part}_proj", "hidden", "hidden") for part in "qkv"),
        c.linear("attn.o", NOMIC_LAYER + "attn.out_proj", "hidden", "hidden"),
        c.norm("attn.norm", NOMIC_LAYER + "norm1", bias=True),
        *c.gated_mlp(NOMIC_LAYER + "mlp.", names=("fc12", "fc11", "fc2")),
        c.norm("mlp.norm", NOMIC_LAYER + "norm2", bias=True),
    ),
    dimensions=nomic_dimensions,
    named_by=NOMIC_SIZES,
    keys={
        "hidden_size": "n_embd",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
    },
    defaults={"type_vocab_size": 2, "max_position_embeddings": 2048},
    fusions=(Fusion("attn.qkv", NOMIC_LAYER + "attn.Wqkv", ("attn.q", "attn.k", "attn.v"), native=True),),
    carried={r"(pooler|cls|classifier)\..*": "the head of another task"},
)

FAMILIES = (XLM_ROBERTA, MODERN_BERT, NOMIC_BERT)
