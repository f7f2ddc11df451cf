"""Rules of loaders, each on a model that breaks it and on one that does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from qconvert.architecture import Architecture
from qconvert.cli.lint_command import LOADERS as SPELLED
from qconvert.lint import ERROR, LOADERS, NOTE, WARNING, Problem, Subject, lint
from qconvert.tensors import Codebook, DType, Form, GroupInt, Logical, Plain
from tests.commands import made, qconvert
from tests.models import EMBED, tiny, tiny_config, tiny_shapes

INT4 = GroupInt(4, 32, True, DType.BF16)
ASYM = GroupInt(4, 32, False, DType.BF16)
FP8 = Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128)


def subject(
    forms: dict[str, Form], layout: str = "compressed-tensors", loader: str = "vllm", **how: object
) -> Subject:
    """A tiny model whose tensors have these forms, by what their names end with; the rest is bf16."""
    config = tiny_config("qwen2")
    tensors = {}
    for name, shape in tiny_shapes(config).items():
        form = next((form for end, form in forms.items() if name.endswith(end)), Plain(DType.BF16))
        tensors[name] = Logical(name, shape, form)
    return Subject(tensors, Architecture.of(config), layout, loader, dtype=DType.BF16, **how)  # type: ignore[arg-type]


def serious(s: Subject) -> list[Problem]:
    return [problem for problem in lint(s) if problem.severity != NOTE]


def test_a_model_that_keeps_all_rules_passes_everywhere() -> None:
    assert set(SPELLED) == set(LOADERS)
    for loader in ("vllm", "sglang", "transformers"):
        assert serious(subject({"_proj.weight": INT4}, loader=loader)) == []
    assert serious(subject({"_proj.weight": INT4}, tp=2)) == []


def test_a_gguf_file_is_for_llama_cpp_alone() -> None:
    forms: dict[str, Form] = {"_proj.weight": INT4, EMBED: INT4}
    for loader in LOADERS:
        found = [problem.fact for problem in lint(subject(forms, "gguf", loader))]
        assert found == ([] if loader == "llama.cpp" else [f"{loader} wants safetensors, not a GGUF file"])


@pytest.mark.parametrize(
    ("forms", "how", "severity", "fact"),
    [
        ({"_proj.weight": INT4}, {"loader": "llama.cpp"}, ERROR, "loads GGUF files only"),
        ({"_proj.weight": INT4}, {"loader": "mlx"}, ERROR, "mlx does not read compressed-tensors"),
        ({"_proj.weight": INT4}, {"layout": "mlx"}, ERROR, "vllm does not read mlx"),
        ({"_proj.weight": ASYM}, {"layout": "gptq"}, ERROR, "symmetric GPTQ of 4 and 8 bits"),
        (
            {"_proj.weight": GroupInt(4, 32, True, DType.F16, act_order=True)},
            {"layout": "gptq"},
            ERROR,
            "refuses desc_act",
        ),
        ({"q_proj.weight": INT4}, {}, ERROR, "stacks its parts"),
        ({"_proj.weight": INT4, EMBED: INT4}, {}, ERROR, "does not load an embedding"),
        ({"_proj.weight": ASYM}, {"loader": "transformers"}, WARNING, "fails on packed zero points"),
        ({"_proj.weight": GroupInt(4, 128, True, DType.BF16)}, {"tp": 4}, ERROR, "not a multiple of 128"),
        ({"_proj.weight": FP8}, {"layout": "fp8", "tp": 2}, ERROR, "not a multiple of 128"),
        ({"_proj.weight": INT4}, {"tp": 5}, ERROR, "do not divide among 5 ranks"),
        ({"_proj.weight": GroupInt(4, 32, True, DType.F16)}, {}, WARNING, "rounds its f16 scales to bf16"),
        ({}, {"tokens": 321}, ERROR, "knows 321 tokens, the table has 320 rows"),
        ({}, {"unknown": ("x.weight",)}, WARNING, "not a tensor of"),
    ],
)
def test_each_rule_finds_what_breaks_it(
    forms: dict[str, Form], how: dict[str, object], severity: str, fact: str
) -> None:
    found = serious(subject(forms, **how))  # type: ignore[arg-type]
    assert {problem.severity for problem in found if fact in problem.fact} == {severity}


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
    assert {problem["severity"] for problem in ran.json["problems"]} == {"error", "note"}
    fused = made("fuse", model, "-o", tmp_path / "f")
    ran = qconvert("check", fused, "--for", "transformers")
    assert ran.code == 3 and "`qconvert unfuse`" in ran.out
    (out / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 400}}}))
    assert "knows 401 tokens" in qconvert("check", out, "--for", "vllm").out
