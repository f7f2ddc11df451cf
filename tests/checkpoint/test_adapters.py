"""Adapters are merged as they are read: what PEFT and mlx-lm compute, rounded once, by every command."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from qconvert.checkpoint.adapter_names import Names
from qconvert.convert.runner import block_cost
from qconvert.errors import QConvertError
from qconvert.formats.huggingface.adapter import open_adapter
from qconvert.plan.plan import copy_of
from tests.support.adapters import PREFIX, as_mlx, lora_arrays, merged_f64, numbers, opened, write_peft
from tests.support.commands import qconvert
from tests.support.models import EMBED, HEAD, stored, tiny

MODULES = {
    "model.layers.0.self_attn.q_proj": (256, 256),
    "model.layers.0.self_attn.k_proj": (128, 256),
    "model.layers.1.mlp.down_proj": (256, 384),
}
RANK, ALPHA = 4, 8.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in float32, so that sums show without their rounding."""
    return tiny(tmp_path_factory.mktemp("base") / "base", dtype="f32")


@pytest.fixture(scope="module")
def adapter(base: Path) -> Path:
    return write_peft(base.parent / "my-lora", lora_arrays(MODULES, RANK), base, RANK, ALPHA)


@pytest.mark.parametrize(
    ("more", "scale"),
    [
        ({}, ALPHA / RANK),
        ({"use_rslora": True}, ALPHA / RANK**0.5),
        ({"alpha_pattern": {"q_proj": 2, "k_proj": 2, "down_proj": 2}}, 2 / RANK),
        ({"alpha_pattern": {"^model.layers.0.self_attn.q_proj": 2}}, None),
        ({"alpha_pattern": {r"layers\.0\..*q_proj": 2}}, None),
    ],
)
def test_products_are_added_once_rounded(
    base: Path, tmp_path: Path, more: dict[str, Any], scale: float
) -> None:
    arrays = lora_arrays(MODULES, RANK)
    merged = opened(write_peft(tmp_path / "lora", arrays, base, RANK, ALPHA, **more))
    before = load_file(base / "model.safetensors")
    for module in MODULES:
        factor = scale or (2 / RANK if module.endswith("q_proj") else ALPHA / RANK)
        wanted = merged_f64(before[f"{module}.weight"], arrays, module, factor)
        np.testing.assert_allclose(numbers(merged, f"{module}.weight"), wanted, rtol=0, atol=3e-6)
    others = [
        name for name in before if name.removesuffix(".weight") not in MODULES and before[name].ndim == 2
    ]
    assert all(np.array_equal(numbers(merged, name), before[name]) for name in others) and others


def test_a_merged_bfloat16_weight_is_the_nearest_to_the_sum(tmp_path: Path) -> None:
    """Of every number, the error is that of one rounding: no more than half of its last bit."""
    arrays, base = lora_arrays(MODULES, RANK), tiny(tmp_path / "base")
    checkpoint = opened(write_peft(tmp_path / "lora", arrays, base, RANK, ALPHA))
    raw = {name: np.frombuffer(data, "<u2") for name, (_, _, data) in stored(base).items()}
    for module, shape in MODULES.items():
        name = f"{module}.weight"
        before = (raw[name].astype(np.uint32) << 16).view(np.float32).reshape(shape)
        wanted = merged_f64(before, arrays, module, ALPHA / RANK)
        value = checkpoint.reader.read(checkpoint.tensors[name], 0, shape[0])
        found = (value.arrays[0].astype(np.uint32) << 16).view(np.float32)
        half = np.exp2(np.floor(np.log2(np.abs(wanted))) - 8)  # 8 bits of a fraction
        assert np.all(np.abs(found - wanted) <= half + 5e-7)  # sums in float32 are that far off


def test_what_a_row_becomes_does_not_depend_on_the_rows_beside_it(base: Path, adapter: Path) -> None:
    checkpoint = opened(adapter)
    for module in MODULES:
        tensor = checkpoint.tensors[f"{module}.weight"]
        whole = numbers(checkpoint, tensor.name)
        parts = [
            checkpoint.reader.read(tensor, row, min(row + 37, tensor.rows))
            for row in range(0, tensor.rows, 37)
        ]
        assert np.array_equal(whole, np.concatenate([part.arrays[0] for part in parts]))


@pytest.mark.skipif(not find_spec("mlx_lm"), reason="mlx-lm is not installed")
@pytest.mark.parametrize("dora", [False, True])
def test_mlx_lm_computes_the_same(base: Path, tmp_path: Path, dora: bool) -> None:
    import mlx.core as mx
    from mlx import nn
    from mlx_lm.tuner.dora import DoRALinear
    from mlx_lm.tuner.lora import LoRALinear

    module = "model.layers.1.mlp.down_proj"
    arrays = as_mlx(lora_arrays(MODULES, RANK), [module])
    before = load_file(base / "model.safetensors")[f"{module}.weight"]
    linear = nn.Linear(384, 256, bias=False)
    linear.weight = mx.array(before)
    kind = DoRALinear if dora else LoRALinear
    layer = kind.from_base(linear, r=RANK, scale=2.5)
    layer.lora_a, layer.lora_b = (mx.array(arrays[f"{module}.{end}"]) for end in ("lora_a", "lora_b"))
    if dora:
        layer.m = layer.m * 1.25
        arrays[f"{module}.m"] = np.array(layer.m)
    folder = tmp_path / "mlx"
    folder.mkdir()
    parameters = {"rank": RANK, "scale": 2.5, "dropout": 0.0}
    config = {"fine_tune_type": "dora" if dora else "lora", "lora_parameters": parameters, "model": str(base)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(arrays, folder / "adapters.safetensors")
    wanted = np.array(layer.fuse().weight)
    assert np.abs(wanted - before).max() > 0.1
    np.testing.assert_allclose(numbers(opened(folder), f"{module}.weight"), wanted, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("command", ["quantize --bits 4", "to-gguf --type q4_0", "fuse-qkv"])
def test_commands_write_what_they_write_of_the_merged_model(
    adapter: Path, tmp_path: Path, command: str
) -> None:
    name = "out.gguf" if "gguf" in command else "out"
    ran = qconvert("merge", adapter, "-o", tmp_path / "merged", "-q")
    assert ran.code == 0, ran.err
    outs = []
    for model in (adapter, tmp_path / "merged"):
        out = tmp_path / model.name / name
        out.parent.mkdir(exist_ok=True)
        word, *options = command.split()
        ran = qconvert(word, model, *options, "-o", out, "--max-memory", "1GB")
        assert ran.code == 0, ran.err
        weights = out if out.is_file() else out / "model.safetensors"
        outs.append(weights.read_bytes())
    if "gguf" in command:  # the model's name is among the keys
        from gguf import GGUFReader

        first, second = (GGUFReader(tmp_path / each / name) for each in ("my-lora", "merged"))
        pairs = zip(first.tensors, second.tensors, strict=True)
        assert all(a.name == b.name and np.array_equal(a.data, b.data) for a, b in pairs)
    else:
        assert outs[0] == outs[1]


def test_what_is_printed_and_recorded_names_both(base: Path, adapter: Path, tmp_path: Path) -> None:
    ran = qconvert("quantize", adapter, "--bits", "4", "-o", tmp_path / "out")
    assert ran.out.splitlines()[:2] == [
        f"my-lora merged into base  ->  {tmp_path / 'out'}/",
        "adapter: LoRA of rank 4, 3 weights",
    ]
    assert qconvert("merge", adapter, "-o", tmp_path / "merged").err.splitlines()[-1].startswith("done in ")
    record = json.loads((tmp_path / "merged" / "qconvert.json").read_text())
    kinds = {name: entry["certificate"]["kind"] for name, entry in record["tensors"].items()}
    assert {name for name, kind in kinds.items() if kind == "merged"} == {
        f"{each}.weight" for each in MODULES
    }
    assert set(kinds.values()) == {"merged", "exact"}
    source = json.loads((tmp_path / "out" / "qconvert.json").read_text())["source"]
    assert (source["name"], source["base"]) == ("my-lora", "base")
    assert [file["name"] for file in source["files"]] == ["model.safetensors", "adapter_model.safetensors"]
    assert "Made from `my-lora`, merged into `base`," in (tmp_path / "out" / "README.md").read_text()
    seen = qconvert("inspect", adapter, "--json").json
    assert seen["adapter"] == "LoRA of rank 4, 3 weights"
    assert qconvert("verify", tmp_path / "out", "--against", adapter).code == 0
    assert qconvert("verify", tmp_path / "out", "--against", base).code == 3


def test_the_base_may_be_named_before_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    lost = tmp_path / "lost"
    shutil.copytree(adapter, lost)
    config = json.loads((lost / "adapter_config.json").read_text())
    (lost / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "/home/x/base"})
    )
    ran = qconvert("quantize", lost, "--bits", "4", "-o", tmp_path / "out")
    assert ran.code == 1 and f"write the base before it: BASE+{lost}" in ran.err
    for model in (f"{base}+{lost}", adapter):
        out = tmp_path / f"out-{str(model)[-4:]}"
        assert qconvert("quantize", model, "--bits", "4", "-o", out).code == 0
    outs = sorted(tmp_path.glob("out-*/model.safetensors"))
    assert len(outs) == 2 and outs[0].read_bytes() == outs[1].read_bytes()


def test_measured_and_run_as_any_model(base: Path, adapter: Path, tmp_path: Path) -> None:
    (text := tmp_path / "text.txt").write_text("Once upon a time, there was a small model. " * 40)
    assert qconvert("merge", adapter, "-o", tmp_path / "merged", "-q").code == 0
    words = ["--text", text, "--context", 64, "--chunks", 2, "--json"]
    ran = qconvert("eval", "perplexity", tmp_path / "merged", base, "--reference", adapter, *words)
    assert ran.code == 0, ran.err
    versus = {model["label"]: model["versus"] for model in ran.json["models"]}
    merged, before = (versus[name]["kl"]["mean"]["value"] for name in ("merged", "base"))
    assert abs(merged) < 1e-6 < before
    assert qconvert("generate", adapter, "-p", "Once", "-n", 4).code == 0


def test_a_head_of_its_own_is_written_beside_a_tied_embedding(base: Path, tmp_path: Path) -> None:
    head = np.random.default_rng(3).normal(0, 0.1, (320, 256)).astype(np.float32)
    arrays = {**lora_arrays(MODULES, RANK), f"{PREFIX}lm_head.weight": head}
    lora = write_peft(tmp_path / "lora", arrays, base, RANK, ALPHA, modules_to_save=["lm_head"])
    assert qconvert("merge", lora, "-o", tmp_path / "out", "-q").code == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(found[HEAD], head) and not np.array_equal(found[EMBED], head)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_larger_vocabulary_comes_with_its_tokenizer(base: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    embed = np.random.default_rng(3).normal(0, 0.1, (328, 256)).astype(np.float32)
    arrays = {**lora_arrays(MODULES, RANK), f"{PREFIX}model.embed_tokens.weight": embed}
    lora = write_peft(tmp_path / "lora", arrays, base, RANK, ALPHA, modules_to_save=["embed_tokens"])
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>"])
    tokenizer.save(str(lora / "tokenizer.json"))
    (lora / "chat_template.jinja").write_text("{{ messages }}")
    assert qconvert("merge", lora, "-o", tmp_path / "out", "-q").code == 0
    out = tmp_path / "out"
    assert json.loads((out / "config.json").read_text())["vocab_size"] == 328
    assert Tokenizer.from_file(str(out / "tokenizer.json")).token_to_id("<|im_start|>") is not None
    assert (out / "chat_template.jinja").exists() and (out / "generation_config.json").exists()
    assert not (out / "tokenizer_config.json").exists()  # the base's, which knows less
    ran = qconvert("to-gguf", lora, "--type", "q8_0", "-o", tmp_path / "out.gguf")
    assert ran.code == 0, ran.err


def test_what_a_trained_module_was_before_is_not_read(base: Path, tmp_path: Path) -> None:
    """PEFT keeps all three beside each other where a vocabulary was resized."""
    embed = np.random.default_rng(3).normal(0, 0.1, (328, 256)).astype(np.float32)
    module = f"{PREFIX}model.embed_tokens"
    more = {f"{module}.weight": embed, f"{module}.modules_to_save.weight": embed}
    more |= {f"{module}.original_module.weight": embed * 2}
    lora = write_peft(tmp_path / "lora", {**lora_arrays(MODULES, RANK), **more}, base, RANK, ALPHA)
    assert np.array_equal(numbers(opened(lora), EMBED), embed)


@pytest.mark.parametrize(
    ("stored", "named"),
    [
        ("visual.blocks.0.attn.proj.weight", "model.visual.blocks.0.attn.proj.weight"),
        ("vision_tower.vision_model.head.q.weight", "model.vision_tower.head.q.weight"),
        ("language_model.model.layers.0.q.weight", "model.language_model.layers.0.q.weight"),
        ("multi_modal_projector.linear_1.weight", "model.multi_modal_projector.linear_1.weight"),
        ("h.0.attn.c_attn.weight", "transformer.h.0.attn.c_attn.weight"),
    ],
)
def test_names_are_found_without_the_modules_that_only_hold_others(
    adapter: Path, stored: str, named: str
) -> None:
    checkpoint = opened(adapter.parent / "base")
    tensor = next(iter(checkpoint.tensors.values()))
    tensors = {**checkpoint.tensors, stored: tensor}
    names = Names(replace(checkpoint, tensors=tensors), open_adapter(adapter))
    assert names.of(named) == stored
    with pytest.raises(QConvertError, match="has no such tensor"):
        names.of(named.replace(".weight", ".bias"))


def test_a_quantized_base_is_decoded_where_it_is_changed(tmp_path: Path) -> None:
    base = tiny(tmp_path / "base", dtype="f32")
    assert qconvert("quantize", base, "--bits", "8", "-o", tmp_path / "int8", "-q").code == 0
    arrays = lora_arrays(MODULES, RANK)
    lora = write_peft(tmp_path / "lora", arrays, tmp_path / "int8", RANK, ALPHA)
    decoded, merged = opened(tmp_path / "int8"), opened(lora)
    assert (
        qconvert("dequantize", tmp_path / "int8", "--dtype", "f32", "-o", tmp_path / "plain", "-q").code == 0
    )
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    for module in MODULES:
        wanted = merged_f64(plain[f"{module}.weight"], arrays, module, ALPHA / RANK)
        tensor = merged.tensors[f"{module}.weight"]
        found = merged.reader.read(tensor, 0, tensor.rows).arrays[0]
        found = found if found.dtype == np.float32 else (found.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_allclose(found, wanted, rtol=2**-8, atol=2**-9)
    other = "model.layers.1.self_attn.q_proj.weight"
    assert merged.tensors[other] == decoded.tensors[other]


def test_a_run_goes_on_only_with_the_same_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "out", ["--bits", "4", "-q"]
    assert qconvert("quantize", adapter, *words, "-o", out).code == 0
    assert qconvert("quantize", adapter, *words, "-o", out, "--skip-existing").code == 0
    other = tmp_path / "my-lora"
    shutil.copytree(adapter, other)
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))
    ran = qconvert("quantize", other, *words, "-o", out, "--skip-existing")
    assert ran.code == 1 and "it was made with another adapter" in ran.err
    ran = qconvert("quantize", base, *words, "-o", out, "--skip-existing")
    assert ran.code == 1


def test_trainers_put_the_base_config_beside_an_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    lora = tmp_path / "my-lora"
    shutil.copytree(adapter, lora)
    shutil.copy(base / "config.json", lora)
    for model in (adapter, lora):
        assert (
            qconvert("quantize", model, "--bits", "4", "-o", tmp_path / f"out-{model.parent.name}").code == 0
        )
    outs = [path.read_bytes() for path in tmp_path.glob("out-*/model.safetensors")]
    assert len(outs) == 2 and outs[0] == outs[1]


def test_the_memory_of_a_block_counts_what_is_added(base: Path, tmp_path: Path) -> None:
    """Both matrices are held beside the rows, whatever their number."""
    rank, module = 64, "model.layers.1.mlp.down_proj"
    lora = write_peft(tmp_path / "lora", lora_arrays({module: MODULES[module]}, rank), base, rank)
    plans = [copy_of(opened(model).bind()) for model in (base, lora)]
    units = [next(u for u in plan.units if u.output.name == f"{module}.weight") for plan in plans]
    before, after = (block_cost(unit, opened(base).layout, 1 << 20) for unit in units)
    rows, width = MODULES[module]
    assert after - before >= 4 * rank * (rows + width)


def test_no_output_replaces_what_it_is_made_of(base: Path, adapter: Path) -> None:
    for source in (base, adapter):
        ran = qconvert("quantize", adapter, "--bits", "4", "-o", source, "--overwrite")
        assert ran.code == 1 and (base / "model.safetensors").exists(), ran.err
        assert (adapter / "adapter_model.safetensors").exists()


def test_a_model_is_not_taken_for_an_adapter(base: Path, tmp_path: Path) -> None:
    ran = qconvert("merge", base, "-o", tmp_path / "out")
    assert ran.code == 1 and "is a model, not an adapter" in ran.err
    ran = qconvert("quantize", f"{base}+{base}", "--bits", "4", "-o", tmp_path / "out")
    assert ran.code == 1 and "is a model, not an adapter" in ran.err
