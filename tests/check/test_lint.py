"""Rules of loaders, each on a model that breaks it and on one that does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from qconvert.check.loader_rules import lint
from qconvert.check.subject import ERROR, NEEDS, NOTE, WARNING, Subject
from qconvert.cli.check import LOADERS as SPELLED
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, Encoding, ModelTensor, Unquantized
from qconvert.core.layout_traits import LOADERS
from qconvert.models import Architecture
from tests.support.commands import made, qconvert
from tests.support.family_models import ROWS
from tests.support.lint_subjects import ASYM, FP8, INT4, NF4, serious, subject
from tests.support.models import EMBED, HEAD, tiny, tiny_config, tiny_shapes


def test_a_model_that_keeps_all_rules_passes_everywhere() -> None:
    assert set(SPELLED) == set(LOADERS)
    for loader in ("vllm", "sglang", "transformers"):
        found = serious(subject({"_proj.weight": INT4}, loader=loader))
        assert [p.needs for p in found] == (
            ["the package compressed-tensors"] if loader == "transformers" else []
        )
    assert {problem.severity for problem in serious(subject({"_proj.weight": INT4}, tp=2))} == {WARNING}


def test_a_gguf_file_is_for_llama_cpp_and_ollama_alone() -> None:
    encodings: dict[str, Encoding] = {"_proj.weight": INT4, EMBED: INT4}
    for loader in LOADERS:
        found = [problem.fact for problem in lint(subject(encodings, "gguf", loader))]
        assert found == (
            [] if loader in ("llama.cpp", "ollama") else [f"{loader} wants safetensors, not a GGUF file"]
        )


@pytest.mark.parametrize(
    ("kind", "encodings", "layout", "facts"),
    [
        ("qwen2", {}, "compressed-tensors", []),
        ("qwen3", {}, "compressed-tensors", ["ollama does not convert Qwen3ForCausalLM from safetensors"]),
        (
            "mistral",
            {},
            "compressed-tensors",
            ["ollama does not convert MistralForCausalLM from safetensors"],
        ),
        (
            "qwen2",
            {"_proj.weight": INT4},
            "gptq",
            ["ollama does not convert int4-g32 of gptq from safetensors"],
        ),
        ("qwen2", {"_proj.weight": FP8}, "fp8", []),
        ("qwen2", {"_proj.weight": FP8}, "compressed-tensors", []),
        (
            "qwen2",
            {"_proj.weight": replace(FP8, group_size=None, group_rows=1)},
            "mlx",
            ["ollama does not convert e4m3-channel of mlx from safetensors"],
        ),
    ],
)
def test_ollama_converts_some_classes_and_plain_weights(
    kind: str, encodings: dict[str, Encoding], layout: str, facts: list[str]
) -> None:
    config = tiny_config(kind) | {"architectures": [f"{kind.capitalize()}ForCausalLM"]}
    tensors = {
        name: ModelTensor(
            name,
            shape,
            next((e for end, e in encodings.items() if name.endswith(end)), Unquantized(DType.BF16)),
        )
        for name, shape in tiny_shapes(config).items()
    }
    found = serious(Subject(tensors, Architecture.of(config), layout, "ollama", dtype=DType.BF16))
    assert [problem.fact for problem in found] == facts
    assert all(problem.severity == ERROR and "to-gguf --modelfile" in problem.hint for problem in found)


def test_ollama_wants_to_know_the_class() -> None:
    config = tiny_config("qwen2") | {"architectures": []}
    found = serious(Subject({}, Architecture.of(config), "compressed-tensors", "ollama"))
    assert [problem.fact for problem in found] == [
        "ollama does not convert a model without `architectures` from safetensors"
    ]


@pytest.mark.parametrize(
    ("encodings", "how", "severity", "fact"),
    [
        ({"_proj.weight": INT4}, {"loader": "llama.cpp"}, ERROR, "loads GGUF files only"),
        ({"_proj.weight": INT4}, {"loader": "mlx", "layout": "gptq"}, ERROR, "mlx does not read gptq"),
        (
            {"_proj.weight": AffineInt(4, 64, True, DType.BF16)},
            {"loader": "mlx"},
            ERROR,
            "4 bits in groups of 32, and this is int4-g64",
        ),
        ({"_proj.weight": INT4}, {"layout": "mlx"}, ERROR, "vllm does not read mlx"),
        ({"_proj.weight": ASYM}, {"layout": "gptq"}, ERROR, "symmetric GPTQ of 4 and 8 bits"),
        (
            {"_proj.weight": AffineInt(4, 32, True, DType.F16, act_order=True)},
            {"layout": "gptq"},
            ERROR,
            "refuses desc_act",
        ),
        ({"q_proj.weight": INT4}, {}, ERROR, "stacks its parts"),
        ({"_proj.weight": INT4, EMBED: INT4}, {}, ERROR, "does not load an embedding"),
        ({"_proj.weight": ASYM}, {"loader": "transformers"}, NEEDS, "fails on packed zero points"),
        ({"_proj.weight": AffineInt(4, 128, True, DType.BF16)}, {"tp": 4}, ERROR, "not a multiple of 128"),
        ({"_proj.weight": FP8}, {"layout": "fp8", "tp": 2}, ERROR, "not a multiple of 128"),
        ({"_proj.weight": INT4}, {"tp": 5}, ERROR, "do not divide among 5 ranks"),
        ({"_proj.weight": AffineInt(4, 32, True, DType.F16)}, {}, WARNING, "rounds its f16 scales to bf16"),
        ({"_proj.weight": AffineInt(4, 32, True, DType.F16)}, {"layout": "awq"}, WARNING, "rounds its f16"),
        ({"_proj.weight": INT4}, {"tp": 3}, ERROR, "4 heads do not divide among 3 ranks"),
        ({"_proj.weight": INT4}, {"tp": 6, "heads": 6, "kv_heads": 4}, ERROR, "nor can be repeated on them"),
        ({"_proj.weight": INT4}, {"tp": 2}, WARNING, "192 columns on a rank: Marlin kernels want"),
        ({"_proj.weight": AffineInt(4, 16, True, DType.BF16)}, {}, WARNING, "groups of 16 columns have no"),
        (
            {"_proj.weight": FP8},
            {"layout": "fp8", "intermediate": 320},
            ERROR,
            "do not divide into blocks of 128",
        ),
        (
            {"_proj.weight": AffineInt(3, 32, True, DType.BF16)},
            {"loader": "transformers"},
            WARNING,
            "3-bit codes run over words",
        ),
        (
            {"_proj.weight": AffineInt(3, 32, True, DType.BF16)},
            {"loader": "sglang"},
            ERROR,
            "packed integers of 4 and 8 bits, and this is int3-g32",
        ),
        ({"_proj.weight": NF4}, {"layout": "bitsandbytes"}, NEEDS, "with the package vllm-bnb-plugin"),
        ({"_proj.weight": INT4, HEAD: INT4}, {"layout": "awq", "tied": False}, ERROR, "keeps the head plain"),
        ({}, {"tokens": 321}, ERROR, "knows 321 tokens, the table has 320 rows"),
        ({}, {"unknown": ("x.weight",)}, WARNING, "not a tensor of"),
    ],
)
def test_each_rule_finds_what_breaks_it(
    encodings: dict[str, Encoding], how: dict[str, object], severity: str, fact: str
) -> None:
    found = serious(subject(encodings, **how))  # type: ignore[arg-type]
    assert {problem.severity for problem in found if fact in problem.fact} == {severity}


FUSED_QKV = "model.layers.0.self_attn.qkv_proj.weight"


def fused_subject(
    encoding: Encoding, layout: str, loader: str, family: str = "qwen2", tp: int = 1
) -> Subject:
    """One fused linear of a tiny model."""
    architecture = Architecture.of(tiny_config(family))
    tensors = {FUSED_QKV: ModelTensor(FUSED_QKV, architecture.fused[FUSED_QKV].whole.shape, encoding)}
    return Subject(tensors, architecture, layout, loader, tp=tp)


@pytest.mark.parametrize(
    ("encoding", "layout", "loader", "family", "tp", "fact"),
    [
        (
            Unquantized(DType.BF16),
            "compressed-tensors",
            "sglang",
            "qwen2",
            1,
            "knows the parts of this fused",
        ),
        (Unquantized(DType.BF16), "compressed-tensors", "sglang", "llama", 1, None),
        (Unquantized(DType.BF16), "compressed-tensors", "transformers", "llama", 1, "knows the parts"),
        (Unquantized(DType.BF16), "compressed-tensors", "mlx", "llama", 1, "knows the parts"),
        (INT4, "compressed-tensors", "vllm", "qwen2", 1, None),
        (INT4, "gptq", "vllm", "qwen2", 1, "treats it as an unquantized one"),
        (FP8, "fp8", "vllm", "qwen2", 1, None),
        (FP8, "fp8", "vllm", "qwen2", 2, "128 rows on 2 ranks are 64 each, not a multiple of 128"),
    ],
)
def test_fused_linears_as_they_are_stored(
    encoding: Encoding, layout: str, loader: str, family: str, tp: int, fact: str | None
) -> None:
    found = [p.fact for p in lint(fused_subject(encoding, layout, loader, family, tp)) if p.severity == ERROR]
    assert found == [] if fact is None else any(fact in text for text in found), found


@pytest.mark.parametrize(
    ("row", "encoding", "layout", "loader", "fact"),
    [
        ("qwen3-moe", INT4, "compressed-tensors", "vllm", "no module for a quantized stack"),
        ("qwen3-moe", INT4, "compressed-tensors", "transformers", "no module for a quantized stack"),
        ("qwen3-moe", FP8, "fp8", "transformers", None),
        ("qwen3-moe", Unquantized(DType.BF16), "compressed-tensors", "transformers", None),
        (
            "qwen3-moe",
            Unquantized(DType.BF16),
            "compressed-tensors",
            "vllm",
            "wants the linears of each expert",
        ),
        ("qwen3.5-moe", Unquantized(DType.BF16), "compressed-tensors", "vllm", None),
        ("gpt-oss", Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16), "mxfp4", "vllm", None),
    ],
)
def test_experts_as_they_are_stored(
    row: str, encoding: Encoding, layout: str, loader: str, fact: str | None
) -> None:
    architecture = Architecture.of(ROWS[row].config)
    stacks = {n: e.whole for n, e in architecture.fused.items() if e.whole.role == "mlp.experts.gate_up"}
    tensors = {
        n: ModelTensor(n, parameter.shape, encoding)
        for n, parameter in stacks.items()
        if parameter.param == "weight"
    }
    errors = [p.fact for p in lint(Subject(tensors, architecture, layout, loader)) if p.severity == ERROR]
    assert errors == [] if fact is None else any(fact in text for text in errors), errors
    part = "model.layers.0.mlp.experts.0.gate_proj.weight"
    apart = Subject(
        {part: ModelTensor(part, (24, 32), INT4)}, architecture, "compressed-tensors", "transformers"
    )
    native = architecture.fused[next(iter(stacks))].fusion.native
    assert any("holds these experts as one" in p.fact for p in lint(apart)) is native


def test_padding_is_offered_where_it_helps() -> None:
    found = lint(subject({"_proj.weight": AffineInt(4, 128, True, DType.BF16)}, tp=2))
    down = next(p for p in found if "mlp.down_proj" in p.subject and p.severity == ERROR)
    assert "`qconvert convert --pad-to-tp 2`" in down.hint


def test_rows_beyond_the_tokenizer_are_told() -> None:
    found = [p.fact for p in lint(subject({}, tokens=300))]
    assert "20 rows beyond the tokenizer's 300 tokens are padding" in found


def test_what_is_left_in_16_bits_is_listed_with_its_bytes() -> None:
    notes = [problem for problem in lint(subject({"_proj.weight": INT4})) if problem.severity == NOTE]
    assert [(note.subject, note.fact) for note in notes] == [
        ("embed", f"{320 * 256 * 2:,} bytes are not quantized")
    ]


def test_the_command_leaves_with_3_where_the_loader_would_fail(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "qwen2")
    out = made("quantize", model, "--scheme", "int4-g64", "-o", tmp_path / "q")
    assert qconvert("check", out, "--for", "vllm").code == 0
    ran = qconvert("check", out, "--for", "vllm", "--tp", "8", "--json")
    assert ran.code == 3
    assert {problem["severity"] for problem in ran.json["problems"]} == {"error", "warning", "note"}
    said = [(problem["subject"], problem["fact"]) for problem in ran.json["problems"]]
    assert not [fact for about, fact in said if about == "linears"]  # nothing is computed
    fused = made("fuse", model, "-o", tmp_path / "f")
    ran = qconvert("check", fused, "--for", "transformers")
    assert ran.code == 3 and "`qconvert unfuse`" in ran.out
    (out / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 400}}}))
    assert "knows 401 tokens" in qconvert("check", out, "--for", "vllm").out
