"""Every family on a tiny checkpoint of it: counts, linears, and one set of weights in two spellings."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.convert.runner import gather
from qconvert.core.values import DenseRows
from qconvert.models import Architecture, Parameter
from qconvert.models.parameter_table import census_of_config, table_of_tensors
from qconvert.plan.plan import Plan, copy_of
from tests.support.commands import qconvert
from tests.support.compiling import fused, unfused

# What the golden file counts and the model does not: a rotary buffer, and a stored head that is tied.
NO_PARAMETERS = {"chatglm2": 4, "yuan2": 256 * 64}
# fmt: off
ZOO = [
    "baichuan", "bert", "chatglm2", "command-r", "deepseek-v1-moe", "deepseek-v2", "falcon-7b-style",
    "falcon-new-decoder", "gemma", "gemma2", "glm", "gpt2", "grok-1", "grok-1-jax-names", "internlm2",
    "llama2", "llama3", "mistral", "mixtral", "olmo", "openai-gpt", "openelm", "phi3", "qwen2",
    "qwen2-moe", "qwen2-untied", "qwen3", "qwen3-headdim", "qwen3-moe", "qwen3-moe-nonorm", "rwkv4",
    "skywork", "t5", "yi", "yuan2",
]
# fmt: on
# The linears of families that transformers does not have, as their modelling files name them.
LINEARS = {
    "baichuan": "W_pack o_proj gate_proj up_proj down_proj",
    "chatglm2": "query_key_value dense dense_h_to_4h dense_4h_to_h",
    "deepseek-v1-moe": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "grok-1": "q_proj k_proj v_proj o_proj linear linear_v linear_1",
    "grok-1-jax-names": "query key value linear linear_v linear_1",
    "internlm2": "wqkv wo w1 w2 w3",
    "openelm": "qkv_proj out_proj proj_1 proj_2",
    "skywork": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
    "yuan2": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj",
}


@pytest.fixture
def zoo(assets: Path) -> Path:
    return assets / "fixtures" / "zoo"


def values(checkpoint: Checkpoint, plan: Plan) -> dict[str, np.ndarray]:
    """The rows of every output of a plan that only moves rows."""
    found = {}
    for unit in plan.units:
        value, _ = gather(unit.inputs, checkpoint.reader, 0, unit.output.rows)
        assert isinstance(value, DenseRows) and not unit.ops
        found[unit.output.name] = value.rows_RI
    return found


def by_role(checkpoint: Checkpoint) -> dict[tuple[str, int | None, str], np.ndarray]:
    """The unfused weights by what they are, whatever they are called."""
    architecture = checkpoint.architecture
    cut = values(checkpoint, unfused(copy_of(checkpoint.bind()), architecture))
    placed = {architecture.parameter(name): rows for name, rows in cut.items()}
    return {(p.role, p.layer, p.param): rows for p, rows in placed.items() if isinstance(p, Parameter)}


@pytest.mark.parametrize("name", ZOO)
def test_counts_equal_the_golden_file(zoo: Path, name: str) -> None:
    checkpoint = open_checkpoint(zoo / name)
    golden = json.loads((zoo / name / "golden.json").read_text())
    expected = golden["parameters"] - NO_PARAMETERS.get(name, 0)
    binding = checkpoint.bind()
    assert table_of_tensors(checkpoint.tensors, binding).parameters == expected
    assert census_of_config(Architecture.of(checkpoint.config)).parameters == expected
    assert binding.unknown == ()


@pytest.mark.parametrize("name", LINEARS)
def test_linears_are_those_of_the_modelling_file(zoo: Path, name: str) -> None:
    binding = open_checkpoint(zoo / name).bind()
    found = {
        p.module.rsplit(".", 1)[1]
        for n, p in binding.parameters.items()
        if p.kind == "linear" and p.layer is not None and p.param == "weight"
    }
    assert found == set(LINEARS[name].split())


@pytest.mark.parametrize(
    "name", ["baichuan", "chatglm2", "falcon-7b-style", "falcon-new-decoder", "internlm2", "openelm", "phi3"]
)
def test_fusing_what_was_unfused_gives_the_class_its_own_tensors_back(zoo: Path, name: str) -> None:
    checkpoint = open_checkpoint(zoo / name)
    architecture, plan = checkpoint.architecture, copy_of(checkpoint.bind())
    native = [fusion.role for fusion in architecture.family.fusions if fusion.native]
    cut = unfused(plan, architecture)
    whole = fused(cut, architecture, native)
    assert not set(cut.outputs) & set(architecture.fused) and native
    before, after = values(checkpoint, plan), values(checkpoint, whole)
    assert {n: rows.tobytes() for n, rows in before.items()} == {n: r.tobytes() for n, r in after.items()}


@pytest.mark.parametrize(
    ("one", "other"), [("baichuan", "llama2"), ("internlm2", "yi"), ("skywork", "yi"), ("chatglm2", "glm")]
)
def test_two_spellings_of_the_same_weights_unfuse_to_the_same_rows(zoo: Path, one: str, other: str) -> None:
    ours, theirs = (by_role(open_checkpoint(zoo / name)) for name in (one, other))
    assert ours.keys() == theirs.keys()
    for key, rows in ours.items():
        np.testing.assert_array_equal(rows, theirs[key], err_msg=str(key))


@pytest.mark.parametrize("family", ["bert", "t5", "rwkv4"])
def test_a_family_with_nothing_to_stack_is_not_called_fused(zoo: Path, tmp_path: Path, family: str) -> None:
    ran = qconvert("fuse", zoo / family, "-o", tmp_path / "out")
    assert ran.code == 1 and ": no linears that could be stacked (qkv and gate_up)\n" in ran.err
