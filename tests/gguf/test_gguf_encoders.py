"""BERT and T5 as GGUF: llama.cpp's embeddings and decoder against transformers' in float32."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.huggingface.pooling import read_pooling
from qconvert.models.gguf.declaration import GGUFModel
from qconvert.models.gguf.families import MODELS
from tests.support.commands import qconvert
from tests.support.gguf_families import CLOSE, IDS, add_tokenizer, scatter, written
from tests.support.gguf_models import log_probabilities


def context_of(path: Path, rows: int, **settings: Any) -> Any:
    """llama.cpp's context for a file."""
    from cyllama.llama import llama_cpp

    class Model(llama_cpp.LlamaModel):  # type: ignore[misc, name-defined]
        n_vocab = rows  # the binding's get_logits_ith asks the model for it, which lacks it

    params = llama_cpp.LlamaContextParams()
    params.n_ctx, params.n_threads = 64, 1
    for key, value in settings.items():
        setattr(params, key, value)
    return llama_cpp.LlamaContext(
        Model(str(path), llama_cpp.LlamaModelParams(), verbose=False), params, verbose=False
    )


def batch_of(ids: Sequence[int]) -> Any:
    from cyllama.llama import llama_cpp

    batch = llama_cpp.LlamaBatch(n_tokens=len(ids), embd=0, n_seq_max=1, verbose=False)
    batch.set_batch(list(ids), 0, True)
    return batch


SIZES_T5 = {
    "vocab_size": 320, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0,
}  # fmt: skip
T5: dict[str, dict[str, Any]] = {
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "1.0": {"feed_forward_proj": "relu"},  # its class scales the decoder's output, llama.cpp does not
}


@pytest.mark.parametrize(("encoder", "decoder"), [(2, 3), (3, 2)])
def test_t5_that_is_deeper_in_the_decoder_is_refused(tmp_path: Path, encoder: int, decoder: int) -> None:
    """llama.cpp loads the other one, and refuses this one."""
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    transformers = pytest.importorskip("transformers")
    depth = {"num_layers": encoder, "num_decoder_layers": decoder}
    config = transformers.T5Config(**{**SIZES_T5, **depth}, **T5["1.0"])
    scatter(transformers.T5ForConditionalGeneration(config), 0.1).save_pretrained(tmp_path)
    add_tokenizer(tmp_path)
    out = tmp_path / "m.gguf"
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", out, "-q")
    if encoder > decoder:
        assert ran.code == 0 and context_of(out, 320) is not None
        return
    assert ran.code == 1 and "num_decoder_layers is 3, num_layers 2" in ran.err and not out.exists()
    with pytest.MonkeyPatch.context() as patch:  # what it says of llama.cpp is so
        declared = MODELS["t5"]
        assert isinstance(declared, GGUFModel)
        patch.setitem(MODELS, "t5", replace(declared, checks=()))  # type: ignore[arg-type]
        assert qconvert("to-gguf", tmp_path, "--type", "f32", "-o", out, "-q").code == 0
    with pytest.raises(ValueError, match="could not load"):
        llama_cpp.LlamaModel(str(out), llama_cpp.LlamaModelParams(), verbose=False)


@pytest.mark.parametrize("version", T5)
def test_t5_decodes_as_transformers_does(tmp_path: Path, version: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(**SIZES_T5, **T5[version])
    model = scatter(transformers.T5ForConditionalGeneration(config), 0.1)
    folder = tmp_path / "t5"
    model.to(torch.bfloat16).save_pretrained(folder)
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    add_tokenizer(folder)
    start = [0, *IDS[:7]]
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), decoder_input_ids=torch.tensor([start])).logits[0].numpy()
    context = context_of(written(folder), 320)
    context.encode(batch_of(IDS))
    assert context.decode(batch_of(start)) == 0
    found = np.array([context.get_logits_ith(i) for i in range(len(start))], np.float32)
    # Measured: 0.0025 and 0.0003.
    assert np.abs(log_probabilities(found) - log_probabilities(expected)).max() < CLOSE
    assert np.abs(found - expected).max() < CLOSE * max(1, expected.std())


def bert(folder: Path, class_name: str) -> Any:
    """A random BERT with a vocabulary of its own, in float32 as it was saved."""
    import torch
    import transformers

    config = transformers.BertConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64,
    )  # fmt: skip
    scatter(getattr(transformers, class_name)(config)).to(torch.bfloat16).save_pretrained(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *(f"w{i}" for i in range(315))]) + "\n")
    settings = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, **settings}))
    return getattr(transformers, class_name).from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize("class_name", ["BertModel", "BertForMaskedLM"])
def test_bert_embeds_as_transformers_does(tmp_path: Path, class_name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    model = bert(tmp_path / "bert", class_name)
    with torch.no_grad():
        expected = getattr(model, "bert", model)(torch.tensor([IDS])).last_hidden_state[0].numpy()
    context = context_of(written(tmp_path / "bert"), 320, embeddings=True, pooling_type=0)
    context.encode(batch_of(IDS))
    found = np.array([context.get_embeddings_ith(i) for i in range(len(IDS))], np.float32)
    # Measured: 0.003; llama.cpp's GELU is a table of half-precision numbers.
    assert np.abs(found - expected).max() < CLOSE and expected.std() > 0.5


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("pooling_mode_mean_tokens", 1),
        ("pooling_mode_cls_token", 2),
        ("pooling_mode_lasttoken", 3),
        (None, None),
    ],
)
def test_pooling_of_sentence_transformers(tmp_path: Path, mode: str | None, number: int | None) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    bert(folder, "BertModel")
    if mode is not None:
        modules = [
            {"type": "x.models.Transformer", "path": ""},
            {"type": "x.models.Pooling", "path": "1_Pooling"},
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 64, mode: True})
        )
    with GGUFFile(written(folder)) as file:
        assert "bert.pooling_type" in file.kv if mode else "bert.pooling_type" not in file.kv
        assert mode is None or file.kv["bert.pooling_type"].value == number
        assert file.kv["bert.attention.causal"].value is False


@pytest.mark.parametrize("path", ["..", "../1_Pooling", "/etc", ".", 7])
def test_a_pooling_outside_the_folder_is_not_read(tmp_path: Path, path: object) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": path}]))
    with pytest.raises(CorruptCheckpoint, match=r"modules\.json: its pooling is in .*, not in a folder"):
        read_pooling(folder)


def test_a_pooling_that_llama_cpp_lacks_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    bert(folder, "BertModel")
    (folder / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "p"}]))
    (folder / "p").mkdir()
    (folder / "p" / "config.json").write_text(json.dumps({"pooling_mode_max_tokens": True}))
    ran = qconvert("to-gguf", folder, "--type", "f16", "-o", folder / "m.gguf", "-q")
    assert ran.code == 1 and "pooling_mode_max_tokens, a pooling that llama.cpp lacks" in ran.err
