"""Quantized files of other families load in transformers: nothing is missing, and the logits are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import made, qconvert
from tests.support.family_models import ROWS

PACKED = ["phi3", "qwen2-moe", "command-r"]
UNPACKED = ["falcon-40b"]


@pytest.mark.parametrize("row", [*PACKED, *UNPACKED])
def test_logits_are_those_of_the_dequantized_model(row: str, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    auto = transformers.AutoModelForCausalLM
    model = auto.from_config(transformers.AutoConfig.for_model(**ROWS[row].config))
    model.to(torch.bfloat16).save_pretrained(tmp_path / "model")
    quantized = made("quantize", tmp_path / "model", "--scheme", "int8-channel", "-o", tmp_path / "q")
    plain = made("dequantize", quantized, "-o", tmp_path / "plain")
    options: dict[str, Any] = {"dtype": torch.bfloat16, "output_loading_info": True}
    if row in UNPACKED:
        options["quantization_config"] = transformers.CompressedTensorsConfig(run_compressed=False)
    packed, loading = auto.from_pretrained(quantized, **options)
    ids = torch.tensor([[1, 5, 9, 2, 77, 30, 31, 20]])
    with torch.no_grad():
        expected = auto.from_pretrained(plain, dtype=torch.bfloat16)(ids).logits
        assert torch.equal(packed(ids).logits, expected)
    assert not loading["missing_keys"] and not loading["unexpected_keys"]


def test_a_class_that_looks_at_weights_is_named_before_the_work(tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(**ROWS["rwkv"].config)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    ran = qconvert("quantize", tmp_path / "model", "--scheme", "int8-channel", "--dry-run")
    assert ran.code == 0 and "run_compressed=False" in ran.err
