"""What loaders take only with something else, or on some devices, or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from qconvert.check.loader_rules import lint
from qconvert.check.subject import ERROR, NEEDS, NOTE, Subject
from qconvert.core.activations import Products
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, Encoding, ModelTensor, Unquantized
from qconvert.models import Architecture
from tests.support.commands import made, qconvert
from tests.support.family_models import ROWS
from tests.support.lint_subjects import ASYM, FP8, INT4, subject
from tests.support.models import HEAD, tiny

TENSOR = Codebook("e4m3", None, DType.BF16, DType.BF16, group_rows=None)


@pytest.mark.parametrize(
    ("encodings", "how", "severity", "fact"),
    [
        (
            {"_proj.weight": INT4},
            {"layout": "gptq"},
            NEEDS,
            "gptq weights with the packages optimum and",
        ),
        (
            {"_proj.weight": INT4},
            {"layout": "awq"},
            NEEDS,
            "weights with the packages gptqmodel and accelerate",
        ),
        ({"_proj.weight": INT4}, {}, NEEDS, "weights with the package compressed-tensors"),
        (
            {"down_proj.weight": ASYM, "_proj.weight": INT4},
            {"layout": "gptq"},
            ERROR,
            "one setting for all linears in gptq, and this is int4-asym-g32",
        ),
        (
            {"down_proj.weight": Unquantized(DType.BF16), "_proj.weight": INT4},
            {"layout": "gptq_v2"},
            ERROR,
            "quantized in gptq_v2, and this one is not",
        ),
        (
            {"_proj.weight": INT4, HEAD: INT4},
            {"layout": "gptq", "tied": False},
            ERROR,
            "no quantized head in gptq: it is left with random numbers",
        ),
        (
            {"down_proj.weight": ASYM, "_proj.weight": INT4},
            {},
            ERROR,
            "dequantizes models of one scheme only",
        ),
        ({"_proj.weight": TENSOR}, {"loader": "vllm"}, NOTE, "quantizes them again unless they have one"),
        (
            {"_proj.weight": AffineInt(8, None, False, DType.BF16)},
            {"loader": "vllm", "layout": "int-quantized"},
            ERROR,
            "by symmetric weights only, and this is int8-asym-channel",
        ),
    ],
)
def test_what_one_loader_takes_with_something_else_or_not_at_all(
    encodings: dict[str, Encoding], how: dict[str, object], severity: str, fact: str
) -> None:
    found = lint(subject(encodings, **{"loader": "transformers", **how}))  # type: ignore[arg-type]
    assert {problem.severity for problem in found if fact in problem.fact} == {severity}


def test_int_quantized_weights_are_not_held_against_rules_of_packed_ones() -> None:
    encodings: dict[str, Encoding] = {"_proj.weight": AffineInt(8, None, False, DType.F16)}
    found = lint(subject(encodings, layout="int-quantized", loader="transformers"))
    assert [p.severity for p in found if p.severity != NOTE] == [NEEDS]
    assert not any("Marlin" in p.fact for p in lint(subject(encodings, layout="int-quantized")))


def test_experts_of_a_layer_want_one_scheme() -> None:
    architecture = Architecture.of(ROWS["qwen3-moe"].config)
    part = "model.layers.0.mlp.experts.0.{}_proj.weight"
    shapes = {"gate": (24, 32), "up": (24, 32), "down": (32, 24)}
    for down, wrong in ((INT4, False), (AffineInt(4, None, True, DType.BF16), True)):
        tensors = {
            part.format(name): ModelTensor(part.format(name), shape, down if name == "down" else INT4)
            for name, shape in shapes.items()
        }
        for loader in ("vllm", "sglang", "transformers"):
            found = lint(Subject(tensors, architecture, "compressed-tensors", loader))
            assert any("one scheme for all linears of experts" in p.fact for p in found) is wrong


def test_the_command_ends_with_one_of_three_answers(tmp_path: Path) -> None:
    model = tiny(tmp_path / "m", "qwen2")
    plain = qconvert("check", model, "--for", "transformers")
    assert (plain.code, plain.out.splitlines()[-1]) == (0, "OK: transformers should load this")
    gptq = made("quantize", model, "--scheme", "int4-g64", "--layout", "gptq", "-o", tmp_path / "gptq")
    ran = qconvert("check", gptq, "--for", "transformers")
    said = "OK: transformers should load this, but only with the packages optimum and gptqmodel"
    assert (ran.code, ran.out.splitlines()[-1]) == (0, said)
    assert "needs: config.json: " in ran.out and "  pip install optimum gptqmodel\n" in ran.out
    told = qconvert("check", gptq, "--for", "transformers", "--json").json
    assert (told["verdict"], told["needs"]) == ("loads only with", ["the packages optimum and gptqmodel"])
    asym = made("quantize", model, "--scheme", "int4-asym-g64", "-o", tmp_path / "asym")
    ran = qconvert("check", asym, "--for", "transformers")
    assert ran.code == 0 and "load this\n" not in ran.out
    assert "only with the package compressed-tensors and CompressedTensorsConfig(dequantize=True)" in ran.out
    mixed = made(
        "quantize", model, "--scheme", "int4-asym-g64", "--rule", "mlp.down=int8", "-o", tmp_path / "x"
    )
    ran = qconvert("check", mixed, "--for", "transformers", "--json")
    assert (ran.code, ran.json["verdict"]) == (3, "fails")
    eight = made(
        "quantize", model, "--layout", "int-quantized", "--scheme", "int8-asym-channel", "-o", tmp_path / "8"
    )
    assert qconvert("check", eight, "--for", "vllm").code == 3
    assert "zero points" not in qconvert("check", eight, "--for", "transformers").out


@pytest.mark.parametrize(
    ("encoding", "how", "fact"),
    [
        (INT4, {}, None),
        (AffineInt(4, 32, False, DType.BF16), {}, None),
        (INT4, {"dtype": DType.F32}, None),  # vLLM computes in bfloat16, unless told
        (AffineInt(8, 32, True, DType.BF16), {}, "no kernel for int8-g32 on a CPU"),
        (AffineInt(8, None, True, DType.BF16), {"products": (Products("W8A8", ("int8 per token",)),)}, None),
        (FP8, {"layout": "fp8"}, "a kernel for e4m3-g128x128 on CPUs with AMX only"),
        (TENSOR, {}, "no kernel for e4m3-tensor on a CPU"),
        (replace(TENSOR, group_rows=1), {}, None),
        (Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16), {}, "no kernel for e2m1-g32 on a CPU"),
        (AffineInt(8, 32, True, DType.BF16), {"layout": "torchao"}, None),
        (TENSOR, {"layout": "torchao"}, None),
        (Codebook("nf4", 64, DType.F32, DType.BF16), {"layout": "bitsandbytes"}, "with the package vllm-bnb"),
        (AffineMin(4, 32, DType.BF16, "middle"), {"layout": "torchao"}, "no kernel for middle4-g32 on a CPU"),
    ],
)
def test_what_vllm_has_kernels_for_on_a_cpu(
    encoding: Encoding, how: dict[str, object], fact: str | None
) -> None:
    made = subject({"_proj.weight": encoding}, layout=str(how.pop("layout", "compressed-tensors")))
    found = [p.fact for p in lint(replace(made, device="cpu", **how)) if p.severity in (ERROR, NEEDS)]  # type: ignore[arg-type]
    assert found == [] if fact is None else fact in found[0]
    assert not any("CPU" in p.fact for p in lint(replace(made, **how)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layout", "array", "code", "does"),
    [
        ("compressed-tensors", "weight_scale", 0, "warning: {}, and quantizes them again"),
        ("torchao", "_weight_scale", 3, "error: {}, and takes one scale for all"),
    ],
)
def test_parts_with_scales_of_their_own_are_named_where_scales_can_be_read(
    layout: str, array: str, code: int, does: str, tmp_path: Path
) -> None:
    """What is written here has one for those that loaders stack. vLLM quantizes others again; of torchao's it
    computed all rows of a stack with the scale of one part.
    """
    asked = ("--to", layout, "--scheme", "fp8-tensor")
    out = made("convert", tiny(tmp_path / "m"), *asked, "-o", tmp_path / "out")
    ran = qconvert("check", out, "--for", "vllm")
    assert ran.code == 0 and "stacks its" not in ran.out
    with safe_open(out / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    arrays = load_file(out / "model.safetensors")
    key, query = (f"model.layers.1.self_attn.{each}_proj.{array}" for each in "kq")
    arrays[key] *= 2
    save_file(arrays, out / "model.safetensors", metadata)
    ran = qconvert("check", out, "--for", "vllm")
    between = f"{float(arrays[query]):.3g} to {float(arrays[key]):.3g}"
    stack = f"model.layers.1.self_attn.qkv_proj.weight: vllm stacks its 3 parts, whose scales are {between}"
    said = [line for line in ran.out.splitlines() if "stacks its" in line]
    assert (ran.code, said) == (code, [does.format(stack)])
    bare = subject({"_proj.weight": TENSOR}, layout=layout)
    assert any("unless they have one scale" in problem.fact for problem in lint(bare))
