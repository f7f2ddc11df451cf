"""Models without a head over the vocabulary: those that embed, score and label texts.

transformers saves each and loads what is written of it; llama.cpp embeds with the GGUF.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.errors import CorruptCheckpoint
from qconvert.models import find_family
from tests.gguf.test_gguf_encoders import batch_of, context_of
from tests.support.commands import qconvert
from tests.support.gguf_families import CLOSE, IDS, add_tokenizer, scatter, written

SIZES = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
ROWS = {
    "Qwen3Model": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "Qwen3ForSequenceClassification": ("Qwen3Config", {"head_dim": 16, "num_labels": 1}),
    "Qwen2ForTokenClassification": ("Qwen2Config", {"num_labels": 3}),
    "LlamaForSequenceClassification": ("LlamaConfig", {"num_labels": 1}),
    "MistralModel": ("MistralConfig", {}),
    "Gemma3TextModel": ("Gemma3TextConfig", {"head_dim": 16}),
    "Gemma2ForSequenceClassification": ("Gemma2Config", {"head_dim": 16, "num_labels": 2}),
    "BertForSequenceClassification": ("BertConfig", {"num_labels": 1}),
    "BertForTokenClassification": ("BertConfig", {}),
}


def saved(folder: Path, class_name: str) -> Any:
    """A model of the class, as it saves itself; in float32."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config_class, more = ROWS[class_name]
    config = getattr(transformers, config_class)(**SIZES, pad_token_id=0, **more)
    torch.manual_seed(7)
    scatter(getattr(transformers, class_name)(config)).to(torch.bfloat16).save_pretrained(folder)
    return getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32).eval()


def first_output(model: Any) -> np.ndarray:
    """What the class makes of the ids: hidden states, or scores."""
    import torch

    with torch.no_grad():
        return np.asarray(model(torch.tensor([IDS]))[0][0])


@pytest.mark.parametrize("class_name", ROWS)
def test_the_class_loads_what_is_written_and_its_own_head_is_kept(tmp_path: Path, class_name: str) -> None:
    pytest.importorskip("compressed_tensors")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = saved(tmp_path / "model", class_name)
    ran = qconvert("quantize", tmp_path / "model", "--scheme", "int8-channel", "-o", tmp_path / "int8")
    assert ran.code == 0, ran.err
    load = getattr(transformers, class_name).from_pretrained
    found, said = load(tmp_path / "int8", dtype=torch.float32, output_loading_info=True)
    assert not said["missing_keys"] and not said["unexpected_keys"]
    heads = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "layer" not in n}
    ignored = set(found.config.quantization_config.quantization_config.ignore)
    assert heads <= ignored
    ran = qconvert("dequantize", tmp_path / "int8", "--dtype", "f32", "-o", tmp_path / "back")
    assert ran.code == 0, ran.err
    expected, ours = first_output(load(tmp_path / "back", dtype=torch.float32)), first_output(found.eval())
    assert np.abs(ours - expected).max() < 1e-3 < np.abs(expected).max()


@pytest.mark.parametrize("class_name", ["Qwen3Model", "MistralModel"])
@pytest.mark.parametrize("stated", ["own", "causal"])
def test_llama_cpp_embeds_as_the_class_does(tmp_path: Path, class_name: str, stated: str) -> None:
    """Qwen3-Embedding is published as a Qwen3ForCausalLM under the names of a Qwen3Model."""
    pytest.importorskip("cyllama.llama.llama_cpp")
    folder = tmp_path / "model"
    expected = first_output(saved(folder, class_name))
    if stated == "causal":
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "architectures": [class_name.replace("Model", "ForCausalLM")],
            "tie_word_embeddings": True,
        }
        (folder / "config.json").write_text(json.dumps(config))
    add_tokenizer(folder)
    context = context_of(written(folder), 320, embeddings=True, pooling_type=0)
    context.decode(batch_of(IDS))
    found = np.array([context.get_embeddings_ith(i) for i in range(len(IDS))], np.float32)
    assert np.abs(found - expected).max() < CLOSE and expected.std() > 0.5


def test_a_model_that_scores_is_named_as_such_and_predicts_no_tokens(tmp_path: Path) -> None:
    saved(tmp_path / "model", "LlamaForSequenceClassification")
    add_tokenizer(tmp_path / "model")
    ran = qconvert("inspect", tmp_path / "model")
    assert "no head over the vocabulary" in ran.out and "the head of another task" in ran.out
    ran = qconvert("eval", "perplexity", tmp_path / "model", "--text", "stdlib", "--chunks", 1)
    assert ran.code == 1 and "LlamaForSequenceClassification has no head" in ran.err


@pytest.mark.parametrize(
    "class_name", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen3VLModel", "Qwen3Modelx"]
)
def test_the_class_of_another_family_is_a_contradiction(class_name: str) -> None:
    with pytest.raises(CorruptCheckpoint, match="model_type is 'qwen3', but architectures says"):
        find_family({"model_type": "qwen3", "architectures": [class_name]})


@pytest.mark.parametrize("class_name", ["Qwen2ForRewardModel", "Qwen2ForProcessRewardModel"])
def test_classes_that_are_published_with_models_are_known_by_their_names(class_name: str) -> None:
    family = find_family({"model_type": "qwen2", "architectures": [class_name]})
    assert all(slot.role != "lm_head" for slot in family.slots)
