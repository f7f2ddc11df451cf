"""Rules of one loader and layout, as they were found by running it or read in its source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from qconvert.check.loader_rules import lint
from qconvert.check.subject import ERROR, NEEDS, NOTE, WARNING, Subject
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, Encoding, ModelTensor, Quantized, Unquantized
from qconvert.models import Architecture
from tests.check.test_lint import FUSED_QKV, fused_subject, subject
from tests.support.commands import made, qconvert
from tests.support.family_models import ROWS
from tests.support.models import EMBED, tiny

INT4, ASYM = AffineInt(4, 32, True, DType.F16), AffineInt(4, 32, False, DType.F16)
INT8, INT3 = AffineInt(8, None, True, DType.BF16), AffineInt(3, 32, True, DType.F16)
MXFP4 = Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16)
E4M3 = Codebook("e4m3", None, DType.BF16, DType.BF16)
NVFP4 = Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided")
FP8 = Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128)


def found(s: Subject, fact: str) -> set[str]:
    """How severe the problems are that say this."""
    return {problem.severity for problem in lint(s) if fact in problem.fact}


@pytest.mark.parametrize(
    ("encoding", "layout", "loader", "severity", "fact"),
    [
        (AffineInt(4, None, False, DType.F16), "awq", "mlx", ERROR, "MLX knows groups of 32, 64 and 128"),
        (ASYM, "awq", "mlx", None, "MLX knows groups"),
        (ASYM, "auto-round", "transformers", NEEDS, "only with ExLlamaV2, on CUDA"),
        (AffineInt(2, 32, False, DType.F16), "auto-round", "transformers", ERROR, "zero points of 2 bits"),
        (INT4, "auto-round", "transformers", None, "stored less one"),
        (ASYM, "gptq", "transformers", NOTE, "GPTQModel's own loader reads zero points only in gptq_v2"),
        (ASYM, "gptq_v2", "transformers", None, "GPTQModel's own loader"),
        (ASYM, "gptq", "sglang", ERROR, "without zero points, in groups of 32, 64 or 128"),
        (INT3, "gptq_v2", "sglang", ERROR, "and this is int3-g32"),
        (AffineInt(4, 16, True, DType.F16), "auto-round", "sglang", ERROR, "and this is int4-g16"),
        (INT4, "gptq", "sglang", None, "SGLang runs GPTQ"),
        (INT4, "awq", "sglang", WARNING, "AWQ only in float16 where it has no zero points"),
        (ASYM, "awq", "sglang", None, "AWQ only in float16"),
        (MXFP4, "compressed-tensors", "sglang", ERROR, "no scheme for e2m1-g32 in compressed-tensors"),
        (
            AffineInt(8, None, False, DType.BF16),
            "int-quantized",
            "sglang",
            ERROR,
            "by symmetric weights only, and this is int8-asym-channel",
        ),
    ],
)
def test_what_a_loader_makes_of_a_layout(
    encoding: Encoding, layout: str, loader: str, severity: str | None, fact: str
) -> None:
    s = subject({"_proj.weight": encoding}, layout=layout, loader=loader)
    assert found(s, fact) == ({severity} if severity else set())


@pytest.mark.parametrize(
    ("encoding", "layout", "loader", "fact"),
    [
        (INT8, "int-quantized", "sglang", "no kernel for experts with int8 weights and inputs"),
        (ASYM, "compressed-tensors", "sglang", "does not load packed zero points of experts"),
        (ASYM, "compressed-tensors", "transformers", "does not load packed zero points of experts"),
        (INT4, "awq", "sglang", "no kernel for experts of AWQ as int4-g32"),
        (ASYM, "awq", "mlx", "finds no module for experts in AWQ"),
        (ASYM, "awq", "transformers", "does not load experts in awq: they are left with random numbers"),
        (INT4, "gptq", "transformers", "does not load experts in gptq"),
        (INT4, "quark", "transformers", "does not load experts in quark"),
        (INT8, "torchao", "vllm", "does not load experts in torchao"),
        (INT8, "int-quantized", "transformers", "does not load experts in int-quantized"),
        (FP8, "compressed-tensors", "transformers", "does not load experts in blocks of FP8"),
        (NVFP4, "compressed-tensors", "transformers", "leaves out the tensor's scale of experts in NVFP4"),
    ],
)
def test_experts_that_a_loader_does_not_run(encoding: Quantized, layout: str, loader: str, fact: str) -> None:
    part = "model.layers.0.mlp.experts.0.gate_proj.weight"
    tensors = {part: ModelTensor(part, (24, 32), encoding)}
    assert found(Subject(tensors, Architecture.of(ROWS["qwen3-moe"].config), layout, loader), fact) == {ERROR}
    assert not found(subject({"_proj.weight": encoding}, layout=layout, loader=loader), fact)


@pytest.mark.parametrize("encoding", [INT8, E4M3])
def test_vllm_loads_torchao_in_the_type_it_computes_in_and_with_a_plain_head(encoding: Quantized) -> None:
    """vLLM 0.32 with torchao 0.18: it stopped at both, and computed float32 as it is when told to."""
    wide = {"scale_dtype": DType.F32} if isinstance(encoding, AffineInt) else {"decoded": DType.F32}
    fact = "does not load torchao's float32"
    s = subject({"_proj.weight": replace(encoding, **wide)}, layout="torchao")  # type: ignore[arg-type]
    assert found(s, fact) == {NEEDS}
    assert not found(subject({"_proj.weight": encoding}, layout="torchao"), fact)
    head = "keeps the head plain in torchao"
    assert found(subject({"lm_head.weight": encoding}, layout="torchao", tied=False), head) == {ERROR}
    assert not found(subject({"_proj.weight": encoding}, layout="torchao"), head)


@pytest.mark.parametrize(
    ("encoding", "layout", "severity", "fact"),
    [
        (
            AffineInt(4, 16, True, DType.BF16),
            "compressed-tensors",
            NEEDS,
            "experts in int4-g16 on CPUs with AMX",
        ),
        (MXFP4, "compressed-tensors", NEEDS, "experts in e2m1-g32 on CPUs with AMX only"),
        (ASYM, "compressed-tensors", ERROR, "no kernel for experts in int4-asym-g32 on a CPU"),
        (INT8, "compressed-tensors", ERROR, "no kernel for experts in int8-channel on a CPU"),
        (E4M3, "compressed-tensors", ERROR, "no kernel for experts in e4m3-channel on a CPU"),
    ],
)
def test_what_vllm_has_kernels_for_experts_for_on_a_cpu(
    encoding: Quantized, layout: str, severity: str, fact: str
) -> None:
    part = "model.layers.0.mlp.experts.0.gate_proj.weight"
    tensors = {part: ModelTensor(part, (24, 32), encoding)}
    architecture = Architecture.of(ROWS["qwen3-moe"].config)
    assert found(Subject(tensors, architecture, layout, "vllm", device="cpu"), fact) == {severity}
    assert not found(Subject(tensors, architecture, layout, "vllm"), fact)


def test_transformers_loads_a_quantized_embedding_where_it_dequantizes() -> None:
    one = AffineInt(4, 32, True, DType.BF16)
    alike = subject({"_proj.weight": one, EMBED: one}, loader="transformers")
    assert found(alike, "fails on quantized embeddings, unless it dequantizes") == {NEEDS}
    other = subject({"_proj.weight": one, EMBED: INT8}, loader="transformers")
    assert found(other, "quantized embeddings, and dequantizes models of one scheme only") == {ERROR}
    assert found(subject({EMBED: one}, loader="sglang"), "does not load an embedding") == {ERROR}


def test_transformers_takes_no_plain_experts_beside_packed_linears() -> None:
    expert, q = "model.layers.0.mlp.experts.0.gate_proj.weight", "model.layers.0.self_attn.q_proj.weight"
    architecture, plain = Architecture.of(ROWS["qwen3-moe"].config), Unquantized(DType.BF16)
    fact = "expects all experts packed where linears are"
    for encoding, severities in ((INT4, {ERROR}), (plain, set())):
        tensors = {expert: ModelTensor(expert, (24, 32), plain), q: ModelTensor(q, (64, 32), encoding)}
        assert found(Subject(tensors, architecture, "compressed-tensors", "transformers"), fact) == severities
        assert not found(Subject(tensors, architecture, "compressed-tensors", "vllm"), fact)


def test_vllm_reads_fused_linears_of_auto_round_and_none_of_gptq() -> None:
    fact = "treats it as an unquantized one"
    assert FUSED_QKV in fused_subject(INT4, "auto-round", "vllm").tensors
    assert not found(fused_subject(INT4, "auto-round", "vllm"), fact)
    assert found(fused_subject(INT4, "gptq", "vllm"), fact) == {ERROR}


def test_the_command_knows_the_form_of_a_layout(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "qwen2")
    for layout, told in (("gptq", True), ("gptq_v2", False)):
        words = ("--scheme", "int4-asym-g64", "--layout", layout)
        out = made("quantize", model, *words, "-o", tmp_path / layout)
        ran = qconvert("check", out, "--for", "transformers")
        assert ("GPTQModel's own loader reads zero points only in gptq_v2" in ran.out) is told
