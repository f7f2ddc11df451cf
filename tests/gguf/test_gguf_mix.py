"""Mixtures: llama-quantize's own choices as oracle, for every file type and several shapes of model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor
from qconvert.errors import BadRecipe
from qconvert.plan.gguf.file_types import FILE_TYPES, find_file_type
from qconvert.plan.gguf.mixture import Choice, MixFacts, choose_types, visit_order
from qconvert.plan.gguf.mixture_rules import LOWEST
from tests.support.gguf_models import write_gguf
from tests.support.llama_quantize import quantize_as_llama_cpp, types_of_llama_cpp

Shapes = list[tuple[str, tuple[int, ...]]]
T = GGMLType

ATTENTION = ("attn_q", "attn_k", "attn_v", "attn_output")


def layer_names(layer: int, *, experts: bool) -> list[str]:
    suffix = "_exps" if experts else ""
    names = [*ATTENTION, *(f"ffn_{part}{suffix}" for part in ("gate", "up", "down"))]
    return [f"blk.{layer}.{name}.weight" for name in names]


def model(facts: MixFacts, width: int, down: int | None = None, *, tied: bool = False) -> Shapes:
    """A model whose matrices have two rows; llama-quantize looks at names and row lengths only."""
    shapes: Shapes = [("token_embd.weight", (4, width)), ("output_norm.weight", (width,))]
    if not tied:
        shapes.append(("output.weight", (4, width)))
    for layer in range(facts.n_layer):
        shapes.append((f"blk.{layer}.attn_norm.weight", (width,)))
        if facts.n_expert:
            shapes.append((f"blk.{layer}.ffn_gate_inp.weight", (facts.n_expert, width)))
        for name in layer_names(layer, experts=bool(facts.n_expert)):
            lead = (facts.n_expert, 2) if "exps" in name else (2,)
            shapes.append((name, (*lead, (down or width) if "ffn_down" in name else width)))
    return shapes


def write_model(path: Path, facts: MixFacts, shapes: Shapes) -> Path:
    """The model as a 16-bit GGUF, as far as llama-quantize reads it."""
    a = facts.arch
    width = shapes[0][1][-1]
    kv = [
        KV.text("general.architecture", a),
        KV.u32(f"{a}.block_count", facts.n_layer),
        KV.u32(f"{a}.context_length", 64),
        KV.u32(f"{a}.embedding_length", width),
        KV.u32(f"{a}.feed_forward_length", width),
        KV.u32(f"{a}.attention.head_count", facts.n_head),
        KV.u32(f"{a}.attention.head_count_kv", facts.n_head_kv),
        KV.f32(f"{a}.attention.layer_norm_rms_epsilon", 1e-5),
        KV.f32(f"{a}.attention.layer_norm_epsilon", 1e-5),
    ]
    if facts.n_expert:
        kv += [
            KV.u32(f"{a}.expert_count", facts.n_expert),
            KV.u32(f"{a}.expert_used_count", 2),
            KV.u32(f"{a}.expert_feed_forward_length", width),
        ]
    kept = ("_norm.weight", "ffn_gate_inp.weight")
    tensors = [GGUFTensor(n, T.F32 if n.endswith(kept) else T.F16, shape) for n, shape in shapes]
    return write_gguf(path, kv, tensors)


MODELS = {
    "qwen2.5-0.5b": (MixFacts("qwen2", 24, 14, 2), 896, 4864, True),
    "llama-70b": (MixFacts("llama", 80, 8, 1), 256, None, False),
    "llama-65b": (MixFacts("llama", 80, 8, 8), 256, None, False),
    "qwen2-80-layers": (MixFacts("qwen2", 80, 4, 4), 256, None, False),
    "mixtral": (MixFacts("llama", 32, 4, 4, 8), 256, None, False),
    "four-experts": (MixFacts("qwen3moe", 24, 4, 4, 4), 256, None, False),
    "many-experts": (MixFacts("qwen3moe", 24, 8, 1, 128), 256, 768, False),
    "falcon": (MixFacts("falcon", 24, 4, 4), 256, None, False),
    "odd-rows": (MixFacts("llama", 7, 4, 2), 224, 100, False),
}


def ones(shapes: Shapes) -> dict[str, np.ndarray]:
    """An importance matrix in which every column of every matrix is as important, of all experts."""
    sizes = {name: shape[-1] * (shape[0] if len(shape) == 3 else 1) for name, shape in shapes}
    return {name: np.ones(size, np.float32) for name, size in sizes.items()}


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_llama_quantize_chooses_the_same(tmp_path: Path, name: str, weighed: bool) -> None:
    facts, width, down, tied = MODELS[name]
    shapes = model(facts, width, down, tied=tied)
    source = write_model(tmp_path / "in.gguf", facts, shapes)
    imatrix = ones(shapes) if weighed else None
    compared = 0
    for file_type in FILE_TYPES.values():
        try:
            ours = choose_types(file_type.name, shapes, facts, imatrix=weighed)
        except BadRecipe as error:  # llama-quantize refuses these as well
            assert "importance matrix" in error.fact and not weighed
            with pytest.raises(RuntimeError):
                quantize_as_llama_cpp(source, tmp_path / "out.gguf", file_type.number)
            continue
        try:
            theirs = types_of_llama_cpp(source, file_type.number, imatrix=imatrix)
        except RuntimeError:
            # Types newer than the wheel's quantizer, and rows that no fallback of its llama.cpp fits.
            assert file_type.base in (T.Q1_0, T.Q2_0, T.NVFP4) or name == "odd-rows"
            continue
        assert list(ours) == list(theirs)
        chosen = {n: choice.type.name.lower() for n, choice in ours.items()}
        assert chosen == {n: kind.lower() for n, kind in theirs.items()}, file_type.name
        compared += 1
    assert compared >= (17 if name == "odd-rows" else 32 if weighed else 25)


def test_llama_quantize_golden_files(assets: Path) -> None:
    """Every tensor of 38 files, with and without an importance matrix."""
    golden = json.loads((assets / "fixtures" / "gguf" / "golden.json").read_text())["files"]
    shapes = [(name, tuple(t["shape"])) for name, t in golden["BF16"]["tensors"].items()]
    by_number = {each.number: each.name for each in FILE_TYPES.values()}
    for key, file in golden.items():
        overrides = [("attn_", T.MXFP4), ("ffn_", T.MXFP4)] if key == "MXFP4-by-tensor-type" else []
        ours = choose_types(
            by_number[file["file_type"]],
            shapes,
            MixFacts("qwen3", 8, 4, 2),
            imatrix=key.endswith("-imat"),
            overrides=overrides,
        )
        assert {name: c.type.name for name, c in ours.items()} == {
            name: t["type"] for name, t in file["tensors"].items()
        }, key
        assert key == "BF16" or list(ours) == list(file["tensors"])


def types_of(shapes: Shapes, facts: MixFacts, file_type: str, part: str, **how: object) -> list[GGMLType]:
    chosen = choose_types(file_type, shapes, facts, **how)  # type: ignore[arg-type]
    return [choice.type for name, choice in chosen.items() if part in name]


def test_q4_k_m_gives_the_published_layers_more_bits() -> None:
    facts = MixFacts("qwen2", 24, 16, 4)
    down = types_of(model(facts, 256), facts, "q4_k_m", "ffn_down")
    more = {0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23}
    assert [i for i, kind in enumerate(down) if kind is T.Q6_K] == sorted(more)
    assert set(down) == {T.Q6_K, T.Q4_K}


@pytest.mark.parametrize("file_type", LOWEST)
def test_eight_experts_in_the_lowest_files(file_type: str) -> None:
    facts = MixFacts("llama", 32, 32, 8, 8)
    shapes = model(facts, 256)
    for part, kind in {"attn_v": T.Q4_K, "attn_k": T.Q4_K, "attn_output": T.Q5_K}.items():
        assert set(types_of(shapes, facts, file_type, part, imatrix=True)) == {kind}


def test_a_fused_qkv_counts_as_values() -> None:
    facts = MixFacts("qwen2", 24, 14, 2)
    shapes: Shapes = [(f"blk.{i}.attn_qkv.weight", (2, 256)) for i in range(24)]
    kinds = types_of(shapes, facts, "q4_k_m", "attn_qkv")
    assert kinds.count(T.Q6_K) == 12


def test_pure_takes_the_base_type_throughout() -> None:
    facts = MixFacts("llama", 4, 4, 1)
    chosen = choose_types("q4_k_m", model(facts, 256), facts, pure=True)
    assert {c.type for c in chosen.values() if not c.reason.startswith("kept")} == {T.Q4_K}


def test_what_the_user_names_comes_first() -> None:
    facts = MixFacts("llama", 4, 4, 1)
    chosen = choose_types(
        "q4_k_m",
        model(facts, 256),
        facts,
        overrides=[(r"blk\.0\.attn_v", T.Q8_0), ("attn_v", T.Q5_1), ("output.weight", T.Q4_0)],
        token_embedding_type=T.Q3_K,
        output_tensor_type=T.BF16,
    )
    assert chosen["token_embd.weight"] == Choice(T.Q3_K, "asked for: token embedding type")
    assert chosen["output.weight"].type is T.BF16
    assert chosen["blk.0.attn_v.weight"].type is T.Q8_0
    assert chosen["blk.1.attn_v.weight"] == Choice(T.Q5_1, "asked for by 'attn_v'")
    assert chosen["blk.1.attn_output.weight"].type is T.Q4_0
    tied = choose_types("q4_k_m", model(facts, 256, tied=True), facts, output_tensor_type=T.Q8_0)
    assert tied["token_embd.weight"].type is T.Q8_0


def test_a_row_that_fits_no_block_is_said_or_refused() -> None:
    facts = MixFacts("qwen2", 24, 14, 2)
    shapes = model(facts, 896, tied=True)
    chosen = choose_types("q4_k_m", shapes, facts)
    choice = chosen["blk.3.attn_q.weight"]
    why = "base type; rows of 896 are not a multiple of q4_k's 256"
    assert choice == Choice(T.Q5_0, why, substituted=True)
    with pytest.raises(BadRecipe) as caught:
        choose_types("q4_k_m", shapes, facts, fallback=False)
    assert caught.value.fact.startswith("blk.0.attn_k.weight: rows of 896")


def test_what_is_kept_says_why() -> None:
    names = {
        "blk.0.attn_norm.weight": (64, 64),
        "blk.0.ffn_gate_inp.weight": (4, 64),
        "blk.0.ffn_gate_inp_shexp.weight": (1, 64),
        "blk.0.attn_q.bias": (64,),
        "blk.0.attn_q.scale": (2, 64),
        "position_embd.weight": (8, 64),
    }
    chosen = choose_types("q8_0", names.items(), MixFacts("qwen2moe", 1, 4, 4, 4))
    assert {choice.type for choice in chosen.values()} == {T.F32}
    assert chosen["blk.0.attn_q.scale"].reason == "kept: not a weight"
    assert chosen["blk.0.ffn_gate_inp.weight"].reason == "kept: ffn_gate_inp"
    assert chosen["blk.0.ffn_gate_inp_shexp.weight"].reason == "kept: one row"


def test_types_that_need_an_importance_matrix_say_so() -> None:
    facts = MixFacts("llama", 4, 4, 1)
    with pytest.raises(BadRecipe, match="needs an importance matrix"):
        choose_types("iq2_xs", model(facts, 256), facts)
    with pytest.raises(BadRecipe, match="q2_k needs an importance matrix"):
        choose_types("q2_k_s", model(facts, 256), facts)
    assert choose_types("q8_0", model(facts, 256), facts, token_embedding_type=T.IQ2_S)
    with pytest.raises(BadRecipe, match=r"token_embd\.weight: iq2_xs needs an importance matrix"):
        choose_types("q8_0", model(facts, 256), facts, token_embedding_type=T.IQ2_XS)
    assert choose_types("q2_k", model(facts, 256), facts)


def test_layers_are_visited_by_number() -> None:
    names = ["blk.10.a", "blk.2.b", "blk.2.B", "output.weight", "blk.2.a", "a"]
    assert visit_order(names) == ["a", "output.weight", "blk.2.B", "blk.2.a", "blk.2.b", "blk.10.a"]


def test_names_of_file_types() -> None:
    assert find_file_type("q4_k").name == "Q4_K_M"
    assert find_file_type("BF16").number == 32
    with pytest.raises(BadRecipe) as caught:
        find_file_type("q4_k_x")
    assert "q4_k_" in (caught.value.hint or "")
    with pytest.raises(BadRecipe, match="not a regular expression"):
        choose_types("q8_0", [], MixFacts("llama", 1, 1, 1), overrides=[("(", T.Q8_0)])


def test_file_type_numbers_are_those_of_gguf() -> None:
    numbers = pytest.importorskip("gguf").LlamaFileType
    for each in FILE_TYPES.values():
        theirs = numbers.__members__.get(f"MOSTLY_{each.name}") or numbers.__members__.get(f"ALL_{each.name}")
        assert theirs == each.number or each.name in ("Q1_0", "Q2_0")  # newer than gguf 0.19
