"""What a writing command says of serving its output is what `check` says of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.commands import failed, made, qconvert
from tests.support.models import tiny

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("serving") / "m", "qwen3", **SIZES, tie_word_embeddings=True)


OUTPUTS = [
    ((), "vllm serve out"),
    (("--layout", "gptq"), "vllm serve out --dtype float16"),
    (("--layout", "gptq", "--dtype", "f16"), "vllm serve out"),
    (("--layout", "awq", "--asym"), "vllm serve out --dtype float16"),
    (("--layout", "gptq", "--asym"), "qconvert check out --for vllm  # vllm refuses this output: "),
    (("--rule", "embed=int8"), "qconvert check out --for vllm  # vllm refuses this output: "),
    (("--rule", "embed=int8", "--untie"), "vllm serve out"),
]


@pytest.mark.parametrize(("options", "next_"), OUTPUTS, ids=lambda each: " ".join(each)[:40])
def test_no_command_is_named_that_check_says_fails(
    tied: Path, here: Path, options: tuple[str, ...], next_: str
) -> None:
    ran = qconvert("quantize", tied, "--bits", 4, *options, "-o", "out")
    assert ran.code == 0, ran.err
    line = ran.err.splitlines()[-1]
    assert line.startswith(f"next: {next_}")
    serves = line.startswith("next: vllm serve")
    checked = qconvert("check", "out", "--for", "vllm")
    assert checked.code == (0 if serves else 3)
    assert ("serve with --dtype float16" in checked.out) == (line.endswith("--dtype float16")) or not serves
    if "transformers should load it" in line:
        assert qconvert("check", "out", "--for", "transformers").code == 0


def test_a_tied_head_is_said_to_stop_vllm(tied: Path, here: Path) -> None:
    for options, said in (((), "vLLM 0.33       no "), (("--untie",), "vLLM 0.33       yes")):
        ran = qconvert("quantize", tied, "--bits", 4, "--rule", "embed=int8", *options, "--dry-run")
        assert said in ran.err


@pytest.mark.parametrize(
    ("asked", "form"),
    [(("--asym",), "int4-asym-g128"), (("--rule", "mlp.down=int8-asym"), "int8-asym-g128"), ((), "")],
)
def test_what_vllm_does_not_run_is_said_before_the_work(
    tied: Path, asked: tuple[str, ...], form: str
) -> None:
    ran = qconvert("quantize", tied, "--bits", 4, "--layout", "gptq", *asked, "--dry-run")
    said = "Warning: vLLM runs symmetric GPTQ of 4 and 8 bits only, and this output is"
    assert (f"{said} {form}: `qconvert convert" in ran.err) == bool(form) == (said in ran.err)


def test_a_config_alone_is_checked_by_what_it_promises(tied: Path, here: Path) -> None:
    (here / "alone").mkdir()
    shutil.copy(tied / "config.json", here / "alone")
    for given in ("alone", "alone/config.json"):
        ran = qconvert("check", given, "--for", "vllm")
        assert ran.code == 0 and "note: weights: judged from config.json only" in ran.out
    config = json.loads((here / "alone" / "config.json").read_text())
    told = config | {"quantization_config": {"quant_method": "torchao"}}  # which headers alone describe
    (here / "alone" / "config.json").write_text(json.dumps(told))
    ran = qconvert("check", "alone", "--for", "vllm")
    failed(
        ran,
        "alone: config.json says torchao, and the sizes of its weights are only in their headers",
        "give the whole model folder, or its name on the Hub",
    )


def test_a_quantized_source_is_sent_where_it_may_be_quantized_again(tied: Path, here: Path) -> None:
    source = made("convert", tied, "--to", "fp8", "-o", "fp8")
    ran = qconvert("quantize", source, "--bits", 4)
    assert ran.code == 1 and "already quantized" in ran.err and "--allow-requantize" in ran.err
    again = ("--to", "compressed-tensors", "--scheme", "int4-g128", "--allow-requantize")
    assert made("convert", source, *again, "-o", "again").is_dir()
