"""Importance by role, layer and expert; kernels loaded before the work; the demo as one object."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.calibrate.imatrix import open_imatrix
from qconvert.convert.precompile import warm
from qconvert.core.encodings import ModelTensor
from qconvert.core.statistics import StatisticsKey
from qconvert.errors import BadRecipe
from qconvert.evaluate import perplexity
from qconvert.models import Architecture
from qconvert.models.gguf.families import facts_of
from qconvert.models.gguf.tensors import records
from qconvert.models.statistics_keys import input_keys, measured
from qconvert.plan.passes.weigh import input_keys_of
from qconvert.plan.plan import Plan, Unit, whole
from tests.quant.test_ops_laws import OPS, named
from tests.support.commands import made, qconvert, strict_json
from tests.support.family_models import EXPERTS, small
from tests.support.gguf_models import imatrix_dat
from tests.support.models import tiny_config
from tests.support.values import encoding_of, value_of

ROOT = Path(__file__).resolve().parents[2]
SIZES = {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 8, "norm_topk_prob": True}


def mixture() -> Architecture:
    return Architecture.of(small("qwen3_moe", "Qwen3MoeForCausalLM", **SIZES))


def importance(path: Path, architecture: Architecture, **others: int) -> Path:
    """An importance matrix of every tensor of a model, its n-th column measured as n."""
    entries = {}
    for record in records(facts_of(architecture)):
        if len(record.shape) < 2:
            continue
        experts = record.shape[0] if len(record.shape) > 2 else 1
        columns = others.get(record.name.split(".")[-2], experts * record.shape[-1])
        entries[record.name] = (1, [float(n) for n in range(columns)])
    path.write_bytes(imatrix_dat(entries))
    return path


@pytest.mark.parametrize("config", [tiny_config("qwen3"), small("qwen3_moe", "Qwen3MoeForCausalLM", **SIZES)])
def test_every_linear_finds_what_it_is_multiplied_by(config: dict[str, Any], tmp_path: Path) -> None:
    architecture = Architecture.of(config)
    found = open_imatrix(importance(tmp_path / "i.dat", architecture), architecture)
    linears = [p for p in architecture.parameters.values() if p.kind == "linear" and p.param == "weight"]
    for parameter in linears:
        if parameter.role == "lm_head":
            continue
        (key,) = input_keys([parameter])
        columns = found.second_moments(key)
        first = 0 if key.expert is None else key.expert * parameter.shape[-1]
        np.testing.assert_array_equal(columns, first + np.arange(parameter.shape[-1], dtype=np.float32))


def test_stacks_of_experts_ask_for_each_and_fused_linears_for_one() -> None:
    architecture = mixture()
    for name, entry in architecture.fused.items():
        keys = input_keys_of(name, architecture)
        if not name.endswith(("weight", "_proj")):
            assert keys == ()
        elif entry.fusion.per_expert:
            parts = len(entry.members) // 4  # gate and up are stacked, each with a key of its own
            assert [key.expert for key in keys] == [expert for expert in range(4) for _ in range(parts)]
            assert len({key.layer for key in keys}) == 1
        else:
            assert len(keys) == 1 and keys[0].expert is None
    assert input_keys_of("model.norm.weight", architecture)[0].role == "final_norm"
    assert input_keys_of("nothing", architecture) == ()


def test_statistics_count_only_where_all_of_them_are_there() -> None:
    keys = tuple(StatisticsKey("mlp.experts.up", 0, expert) for expert in range(3))
    assert measured(keys, set(keys)) == keys  # type: ignore[arg-type]
    assert measured(keys, set(keys[:2])) == ()  # type: ignore[arg-type]
    assert measured((), set()) == ()  # type: ignore[arg-type]


def test_a_matrix_of_another_model_is_refused_but_for_the_embedding(tmp_path: Path) -> None:
    architecture = mixture()
    open_imatrix(importance(tmp_path / "i.dat", architecture, token_embd=7), architecture)
    path = importance(tmp_path / "i.dat", architecture, ffn_down_exps=64)
    with pytest.raises(
        BadRecipe, match=r"ffn_down_exps\.weight: the importance matrix has 64 columns"
    ) as caught:
        open_imatrix(path, architecture)
    assert "the model 128" in caught.value.fact  # 4 experts of 32


def test_a_matrix_of_a_deeper_or_another_model_is_refused_with_both_numbers(tmp_path: Path) -> None:
    two = tiny_config("qwen3")
    deeper = Architecture.of(two | {"num_hidden_layers": 3, "max_window_layers": 3})
    path = importance(tmp_path / "deep.dat", deeper)
    with pytest.raises(BadRecipe, match=r"deep\.dat: the importance matrix has 3 layers, the model 2$"):
        open_imatrix(path, Architecture.of(two))
    shallow = importance(tmp_path / "shallow.dat", Architecture.of(two))
    assert open_imatrix(shallow, deeper).entries, "as llama-quantize takes one that lacks entries"
    (tmp_path / "other.dat").write_bytes(imatrix_dat({"blk.0.attn_kv_latent.weight": (1, [1.0] * 64)}))
    with pytest.raises(BadRecipe, match=r"entries for 1 tensors, and none of them is one of the model's 25$"):
        open_imatrix(tmp_path / "other.dat", Architecture.of(two))


@pytest.mark.parametrize(("op", "encodings"), OPS, ids=named)
def test_every_operation_can_be_tried_on_zeros(op: Any, encodings: tuple[Any, ...]) -> None:
    """Which is how kernels are loaded before the work: a few rows, the fewest that may be made together."""
    for encoding in encodings:
        tensor = ModelTensor("w", (8, 256), encoding)
        unit = Unit((whole(tensor),), (), tensor).then(op)
        before = value_of(encoding)
        warm(Plan((unit, unit)))
        assert encoding_of(before) == encoding


NEW_KERNELS = """
import sys
sys.path.insert(0, {root!r})
import qconvert as library
from qconvert.convert.precompile import warm
from qconvert.plan.recipe import Rule

def loaded():
    modules = [m for n, m in list(sys.modules.items()) if n.startswith("qconvert.quant")]
    kernels = {{id(k): k for m in modules for k in vars(m).values() if hasattr(k, "nopython_signatures")}}
    # Packing belongs to the layout that stores the codes, not to an operation.
    own = [k for k in kernels.values() if "pack" not in k.__name__]
    return {{(k.__name__, s) for k in own for s in k.nopython_signatures}}

model = library.open_model({model!r})
recipe = library.Recipe(library.parse_scheme("int4-asym-g32"), fuse=("qkv",), rules=(Rule("mlp.down", None),))
for request in (
    library.Request("quantize", recipe),
    library.Request("to-gguf", target=library.GGUFTarget("q4_k_m")),
    library.Request("convert", target=library.Target("bitsandbytes", table="nf4-nested")),
):
    job = library.prepare(model, request, library.RunOptions(jobs=4, verify=False))
    warm(job.compiled.plan)
    before = loaded()
    library.execute(job, __import__("pathlib").Path({out!r}) / f"{{request.target is None}}.gguf"
                    if job.compiled.is_gguf else __import__("pathlib").Path({out!r}) / f"{{len(before)}}")
    assert before and loaded() == before, loaded() - before
print("done")
"""


def test_nothing_is_compiled_while_the_work_is_done(models: Path, tmp_path: Path) -> None:
    """In a process of its own, where no kernel was used before."""
    code = NEW_KERNELS.format(root=str(ROOT), model=str(models / "plain"), out=str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.stdout == "done\n", done.stderr[-3000:]


def test_the_demo_is_one_object_and_leaves_what_it_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On windows of 64 tokens here, which take a moment; both outputs and the report in three views."""
    monkeypatch.setattr(perplexity, "run", partial(perplexity.run, context=64))
    ran = qconvert("demo", "--chunks", 2, "-o", "d", "--json")
    found = strict_json(ran.out)
    assert (ran.code, found["schema"], found["out"]) == (0, 1, "d")
    report = found["report"]
    assert report["chunks"] == 2 and report["reference"] == "embedded" and report["noise_floor"]
    assert [model["label"] for model in report["models"]] == ["embedded", "int8-g128", "int4-g128-fused"]
    names = {path.name for path in (here / "d").iterdir()}
    assert names == {"int8-g128", "int4-g128-fused", "report.json", "report.md", "report.html"}
    assert json.loads((here / "d" / "report.json").read_text()) == report


def test_an_importance_matrix_weighs_the_codes_of_both_containers(models: Path, here: Path) -> None:
    config = json.loads((models / "plain" / "config.json").read_text())
    file = importance(here / "i.dat", Architecture.of(config))
    for command, how in (("quantize", ("--bits", 3)), ("to-gguf", ("--type", "q4_0"))):
        end = ".gguf" if command == "to-gguf" else ""
        plain = made(command, models / "plain", *how, "-o", f"plain{end}")
        weighed = made(command, models / "plain", *how, "--imatrix", file, "-o", f"weighed{end}")
        files = [path / "model.safetensors" if path.is_dir() else path for path in (plain, weighed)]
        assert files[0].read_bytes() != files[1].read_bytes()
        assert qconvert("verify", weighed, "--against", models / "plain").code == 0
    assert b"quantize.imatrix.file" in (here / "weighed.gguf").read_bytes()
