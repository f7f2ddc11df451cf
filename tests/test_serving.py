"""What a writing command says of serving its output is what `check` says of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.commands import failed, made, qconvert
from tests.models import tiny

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


def test_a_config_alone_has_nothing_to_check(tied: Path, here: Path) -> None:
    (here / "alone").mkdir()
    shutil.copy(tied / "config.json", here / "alone")
    for given in ("alone", "alone/config.json"):
        ran = qconvert("check", given, "--for", "vllm")
        failed(ran, f"{given}: no weights beside the config.json", "give the whole model folder")


def test_a_quantized_source_is_sent_where_it_may_be_quantized_again(tied: Path, here: Path) -> None:
    source = made("convert", tied, "--to", "fp8", "-o", "fp8")
    ran = qconvert("quantize", source, "--bits", 4)
    assert ran.code == 1 and "already quantized" in ran.err and "--allow-requantize" in ran.err
    again = ("--to", "compressed-tensors", "--scheme", "int4-g128", "--allow-requantize")
    assert made("convert", source, *again, "-o", "again").is_dir()
