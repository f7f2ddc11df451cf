"""What a model is called: gguf's guesses, the converter's keys, and file names that stay in their folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.formats.huggingface.model_card_header import read_front_matter
from qconvert.models.gguf.identity import ParameterCounts, identify

gguf = pytest.importorskip("gguf")

COUNTS = ParameterCounts(10_000_000, 10_000_000, 0, 0)
CARD = """---
license: apache-2.0
license_link: https://huggingface.co/Qwen/X/blob/main/LICENSE
language:
- en
- no
pipeline_tag: text-generation
base_model: Qwen/Qwen2.5-0.5B
tags:
- chat
datasets:
- org/data-set
---
# Hello
"""


def card(folder: Path, text: str) -> dict[str, Any]:
    (folder / "README.md").write_text(text, encoding="utf-8")
    return read_front_matter(folder)


def test_the_keys_of_the_converter(tmp_path: Path) -> None:
    """Recorded from convert_hf_to_gguf.py of llama.cpp at commit 0c1e57098 for the same card."""
    generation = {
        "top_k": 20,
        "top_p": 0.8,
        "temperature": 0.7,
        "repetition_penalty": 1.05,
        "do_sample": True,
    }
    found = identify("Qwen2.5-0.5B-Instruct", {}, COUNTS, card=card(tmp_path, CARD), generation=generation)
    assert [(e.key.removeprefix("general."), e.value) for e in found.kv] == [
        ("sampling.top_k", 20),
        ("sampling.top_p", 0.8),
        ("sampling.temp", 0.7),
        ("sampling.penalty_repeat", 1.05),
        ("name", "Qwen2.5 0.5B Instruct"),
        ("finetune", "0.5b-Instruct"),
        ("basename", "Qwen2.5"),
        ("size_label", "10M"),
        ("license", "apache-2.0"),
        ("license.link", "https://huggingface.co/Qwen/X/blob/main/LICENSE"),
        ("base_model.count", 1),
        ("base_model.0.name", "Qwen2.5 0.5B"),
        ("base_model.0.organization", "Qwen"),
        ("base_model.0.repo_url", "https://huggingface.co/Qwen/Qwen2.5-0.5B"),
        ("dataset.count", 1),
        ("dataset.0.name", "Data Set"),
        ("dataset.0.organization", "Org"),
        ("dataset.0.repo_url", "https://huggingface.co/org/data-set"),
        ("tags", ("chat", "text-generation")),
        ("languages", ("en", "no")),
    ]


@pytest.mark.parametrize(
    ("folder", "total", "name"),
    [
        ("Qwen2.5-0.5B-Instruct", 494_032_768, "Qwen2.5-0.5B-Instruct-Q4_K_M.gguf"),
        ("Mistral-7B-Instruct-v0.2", 7_241_732_096, "Mistral-7B-Instruct-v0.2-Q4_K_M.gguf"),
        ("my model", 7_300_000, "My-Model-7.3M-Q4_K_M.gguf"),
        ("", 1000, "model-1.0K-Q4_K_M.gguf"),
    ],
)
def test_file_names_follow_the_convention(folder: str, total: int, name: str) -> None:
    assert identify(folder, {}, ParameterCounts(total, total, 0, 0)).file_name("Q4_K_M") == name


@given(st.text(max_size=300))
def test_no_card_leads_a_file_out_of_its_folder(text: str) -> None:
    name = identify("m", {}, COUNTS, card={"model_name": text, "finetune": text, "version": text}).file_name(
        "F16"
    )
    assert Path(name).name == name
    assert name.endswith(".gguf")
    assert not name.startswith(".")


def test_sizes_are_counted_as_gguf_counts_them() -> None:
    tensors = [
        ("token_embd.weight", (1000, 64)),
        ("blk.0.ffn_gate_exps.weight", (8, 32, 64)),
        ("blk.0.ffn_down_exps.weight", (8, 64, 32)),
        ("blk.0.attn_q.bias", (64,)),
    ]
    writer = gguf.GGUFWriter(None, "llama")
    for name, shape in tensors:
        writer.add_tensor_info(name, shape, np.dtype("float16"), 0)
    ours = ParameterCounts.of(tensors)
    assert (ours.total, ours.shared, ours.expert, ours.experts) == writer.get_total_parameter_count()
    assert ours.label == "8x68K"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# only text",
        "---\nlicense: mit",  # never closed
        "---\n- a\n- list\n---\n",
        "---\n: [broken\n---\n",
        "---\n" + "[" * 5000 + "\n---\n",
    ],
)
def test_a_card_that_says_nothing(tmp_path: Path, text: str) -> None:
    assert not card(tmp_path, text)


def test_a_yaml_tag_makes_nothing(tmp_path: Path) -> None:
    text = f"---\nlicense: !!python/object/apply:os.mkdir [{tmp_path / 'made'}]\n---\n"
    assert card(tmp_path, text) == {"license": [str(tmp_path / "made")]}
    assert not (tmp_path / "made").exists()


def test_front_matter_is_texts(tmp_path: Path) -> None:
    text = "---\nlanguage: no\nversion: 1.0\nbase_model: null\ntags: [a, {b: c}, yes]\nextra: {a: b}\n---\n"
    assert card(tmp_path, text) == {"language": "no", "version": "1.0", "tags": ["a", "yes"]}
    assert not read_front_matter(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "bad", [{"top_k": None}, {"top_k": "20"}, {"top_p": True}, {"top_k": 1.5}, {"sequence": 3}]
)
def test_odd_sampling_values_are_left_out(bad: dict[str, Any]) -> None:
    kv = identify("m", {}, COUNTS, generation=bad).kv
    assert not [entry for entry in kv if "sampling" in entry.key]
