"""ModernBERT, XLM-RoBERTa, Nomic's and EmbeddingGemma as GGUF: llama.cpp embeds as transformers does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.formats.gguf.reader import GGUFFile
from tests.gguf.test_gguf_encoders import batch_of, context_of
from tests.support.commands import qconvert
from tests.support.gguf_families import IDS, add_tokenizer, scatter, written
from tests.support.gguf_models import SIZES, TEXT, llama_cpp_vocab
from tests.support.models import stored
from tests.support.newer_families import restated

ENCODER = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 66,
}  # fmt: skip
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA = {
    **SIZES, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7,
    "use_bidirectional_attention": True, "tie_word_embeddings": True, "rope_parameters": ROPES,
}  # fmt: skip
MODERN = {**ENCODER, "pad_token_id": 0, "local_attention": 8}
# The type of each model, its class, llama.cpp's name of its graph, its config, and what a file comes back as.
CONFIGS: dict[str, tuple[str, str, str, dict[str, Any], str]] = {
    "modernbert": ("modernbert", "ModernBertModel", "modern-bert", MODERN, "ModernBertModel"),
    "modernbert-masked": ("modernbert", "ModernBertForMaskedLM", "modern-bert", MODERN, "ModernBertModel"),
    "xlm-roberta": ("xlm-roberta", "XLMRobertaModel", "bert", {**ENCODER, "pad_token_id": 1}, "BertModel"),
    "roberta-masked": ("roberta", "RobertaForMaskedLM", "bert", {**ENCODER, "pad_token_id": 1}, "BertModel"),
    "nomic": ("nomic_bert", "NomicBertModel", "nomic-bert", ENCODER, "NomicBertModel"),
    "embeddinggemma": ("gemma3_text", "Gemma3TextModel", "gemma-embedding", GEMMA, "Gemma3ForCausalLM"),
}
LONGER = [(7 * i + i * i) % 300 + 2 for i in range(60)]


def made(folder: Path, name: str) -> Any:
    """A random model of a class, saved by transformers in float32 with a tokenizer, and loaded again."""
    import torch
    import transformers

    model_type, class_name, _, sizes, _ = CONFIGS[name]
    class_ = getattr(transformers, class_name)
    gemma = name == "embeddinggemma"
    model = scatter(class_(transformers.AutoConfig.for_model(model_type, **sizes)), 0.08 if gemma else 0.15)
    for parameter, weight in model.named_parameters():
        if gemma and "norm" in parameter:
            weight.data -= 1
    model.save_pretrained(folder)
    if gemma:  # the class halves the window as it reads it, and saves what it made of it
        restated(folder, sliding_window=sizes["sliding_window"])
    if name == "nomic":
        add_word_pieces(folder)
    else:
        add_tokenizer(folder)
    return class_.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def add_word_pieces(folder: Path) -> None:
    """BERT's tokenizer, of 320 words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *(f"w{i}" for i in range(315))]) + "\n")
    settings = {f"{kind}_token": f"[{kind.upper()}]" for kind in ("pad", "unk", "cls", "sep", "mask")}
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True, **settings}))


def states(model: Any, ids: list[int]) -> np.ndarray:
    import torch

    inner = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        found: np.ndarray = inner(torch.tensor([ids])).last_hidden_state[0].numpy()
    return found


def difference(gguf: Path, model: Any, ids: list[int]) -> float:
    """The largest difference between llama.cpp's last states and transformers'."""
    expected = states(model, ids)
    assert expected.std() > 0.5
    context = context_of(gguf, 320, embeddings=True, pooling_type=0)
    context.encode(batch_of(ids))
    found = np.array([context.get_embeddings_ith(i) for i in range(len(ids))], np.float32)
    return float(np.abs(found - expected).max())


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_embeds_as_transformers_does(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    model, gguf = made(tmp_path, name), written(tmp_path)
    with GGUFFile(gguf) as file:
        assert file.kv["general.architecture"].value == CONFIGS[name][2]
    # Measured, of states that spread by 1.0: 0.0015 (xlm-roberta) to 0.007 (modernbert, whose GELU is a table
    # of half-precision numbers in llama.cpp).
    assert difference(gguf, model, IDS) < 0.02
    assert difference(gguf, model, LONGER) < 0.02


@pytest.mark.parametrize("name", CONFIGS)
def test_eight_bits_load_and_stay_near(tmp_path: Path, name: str) -> None:
    pytest.importorskip("cyllama.llama.llama_cpp")
    model, gguf = made(tmp_path, name), written(tmp_path, "--type", "q8_0")
    # Measured: 0.04 (embeddinggemma) to 0.14.
    assert 0 < difference(gguf, model, IDS) < 0.3


@pytest.mark.parametrize("name", CONFIGS)
def test_files_go_back_to_a_model_that_computes_the_same(tmp_path: Path, name: str) -> None:
    """The weights come back byte for byte, under the names of the class that has the graph."""
    import torch
    import transformers

    model, gguf, out = made(tmp_path, name), written(tmp_path), tmp_path / "back"
    back = qconvert("from-gguf", gguf, "-o", out, "-q", "--dtype", "f32")
    assert back.code == 0, back.err
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == [CONFIGS[name][4]]
    again = transformers.AutoModel.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    assert np.abs(states(again.eval(), IDS) - states(model, IDS)).max() < 1e-5
    ours, theirs = (sorted(stored(folder).values()) for folder in (out, tmp_path))
    kept = [each for each in ours if each in theirs]
    assert len(kept) >= len(ours) - (CONFIGS[name][2] == "bert")  # of positions, those that no token has


def test_windows_of_modernbert_that_llama_cpp_does_not_have_are_refused(tmp_path: Path) -> None:
    made(tmp_path, "modernbert")
    restated(tmp_path, layer_types=None, global_attn_every_n_layers=2)
    ran = qconvert("to-gguf", tmp_path, "--type", "f32", "-o", tmp_path / "m.gguf")
    assert ran.code == 1 and "every 3rd layer full" in ran.err and not list(tmp_path.glob("*.gguf"))


def test_published_words_of_modernbert_make_the_same_file(tmp_path: Path) -> None:
    made(tmp_path, "modernbert")
    plain = written(tmp_path).read_bytes()
    restated(
        tmp_path, layer_types=None, rope_parameters=None, global_attn_every_n_layers=3,
        global_rope_theta=160000.0, local_rope_theta=10000.0,
    )  # fmt: skip
    assert written(tmp_path).read_bytes() == plain


PUBLISHED = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner", "layer_norm_eps": "layer_norm_epsilon",
}  # fmt: skip


def test_published_words_of_nomic_make_the_same_file(tmp_path: Path) -> None:
    """And the context is what the model was trained for."""
    made(tmp_path, "nomic")
    restated(tmp_path, head_dim=None)
    plain = written(tmp_path).read_bytes()
    config = json.loads((tmp_path / "config.json").read_text())
    older = {old: config[new] for new, old in PUBLISHED.items()}
    gone = dict.fromkeys((*PUBLISHED, "rope_parameters", "hidden_act", "max_position_embeddings", "head_dim"))
    other = {"rotary_emb_base": 1000, "activation_function": "swiglu", "moe_every_n_layers": 0}
    restated(tmp_path, **{**gone, **older, **other, "n_positions": 66})
    assert written(tmp_path).read_bytes() == plain
    restated(tmp_path, n_positions=8192, max_trained_positions=2048)
    with GGUFFile(written(tmp_path)) as file:
        assert file.kv["nomic-bert.context_length"].value == 2048


def test_llama_cpp_cuts_texts_as_a_unigram_tokenizer_with_both_ends(tmp_path: Path) -> None:
    """XLM-RoBERTa's: four special tokens first, pieces by their probability, a token at each end."""
    llama_cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    made(tmp_path, "xlm-roberta")
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator([TEXT, "Hello world café"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), special, strict=True))
    settings = {"tokenizer_class": "XLMRobertaTokenizer", **names, "cls_token": "<s>", "sep_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab, model = llama_cpp_vocab(llama_cpp, written(tmp_path))
    for text in ("Hello world", "The quick brown fox", "it's 1234 o'clock.", " lead"):
        expected = tokenizer.encode(text).ids
        assert list(vocab.tokenize(text, add_special=True, parse_special=False)) == expected, text
    del model
