"""The options of the commands that write: each does what its help says, one small model at a time."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.core.dtypes import DType
from qconvert.formats.gguf.header import read_gguf
from tests.support.commands import failed, files_of, made, qconvert
from tests.support.models import HEAD, stored, tiny

Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def manifest(folder: Path) -> Any:
    return json.loads((folder / "qconvert.json").read_text())


def forms(folder: Path) -> dict[str, str]:
    return {name: entry["form"] for name, entry in manifest(folder)["tensors"].items()}


@pytest.mark.parametrize(
    ("flags", "form"),
    [
        (("--bits", 4), "int4-g128"),
        (("--bits", 4, "--sym"), "int4-g128"),
        (("--bits", 4, "--asym"), "int4-asym-g128"),
        (("--bits", 3, "--group-size", 32), "int3-g32"),
        (("--bits", 8, "--group-size", "channel"), "int8-channel"),
        (("--scheme", "int5-asym-g64"), "int5-asym-g64"),
        (("--scheme", "int4"), "int4-g128"),
        (("--bits", 4, "--layout", "gptq", "--group-size", 64), "int4-g64"),
    ],
)
def test_the_scheme_is_the_one_that_was_asked_for(
    flags: tuple[object, ...], form: str, models: Path, here: Path
) -> None:
    out = made("quantize", models / "plain", *flags)
    layout = "-gptq" if "--layout" in flags else ""
    assert out.name == f"plain-{form}{layout}" and forms(out)[DOWN] == form
    # A group as wide as a row keeps its name: loaders then find one scheme, not two.
    assert forms(out)[Q] == form
    assert forms(out)["model.embed_tokens.weight"] == "bf16"


def test_the_search_is_the_default_and_can_be_left_out(models: Path, here: Path) -> None:
    ways = {name: ("--bits", 3, *flag, "-o", name) for name, flag in _SEARCHES.items()}
    found = {name: made("quantize", models / "plain", *flags) for name, flags in ways.items()}
    weights = {name: (out / "model.safetensors").read_bytes() for name, out in found.items()}
    assert weights["default"] == weights["search"] != weights["min-max"]
    errors = {name: manifest(out)["totals"]["relative_rms_error"] for name, out in found.items()}
    assert errors["search"] < errors["min-max"]
    assert [manifest(found[name])["recipe"]["search"] for name in ("search", "min-max")] == [True, False]


_SEARCHES: dict[str, tuple[str, ...]] = {
    "default": (),
    "search": ("--scale-search",),
    "min-max": ("--min-max",),
}


def test_the_last_rule_wins_and_what_is_kept_stays(models: Path, here: Path) -> None:
    rules = ("--rule", "mlp.down=int8-g32", "--rule", "re:down_proj=int3-g64", "--keep", "attn.o")
    out = made("quantize", models / "plain", "--bits", 4, *rules)
    assert out.name == "plain-int4-g128-mixed"
    found = forms(out)
    assert (found[DOWN], found[Q]) == ("int3-g64", "int4-g128")
    kept = "model.layers.0.self_attn.o_proj.weight"
    assert found[kept] == "bf16" and stored(out)[kept] == stored(models / "plain")[kept]
    assert kept.removesuffix(".weight") in (out / "config.json").read_text()


def test_a_recipe_is_read_first_and_options_win_over_it(models: Path, here: Path) -> None:
    recipe = {"scheme": "int8-g64", "rules": [{"select": "mlp.down", "scheme": "int4-g32"}], "fuse": ["qkv"]}
    (here / "r.yaml").write_text(json.dumps(recipe))
    out = made(
        "quantize", models / "plain", "--recipe", "r.yaml", "--bits", 4, "--rule", "attn.o=int8", "-o", "a"
    )
    found = manifest(out)["recipe"]
    assert found["scheme"] == "int4-g64" and found["fuse"] == ["qkv"]
    assert [rule["select"] for rule in found["rules"]] == ["mlp.down", "attn.o"]
    ran = qconvert("quantize", models / "plain", "--recipe", "nowhere.yaml")
    assert ran.code == 1 and ran.err.startswith("Error: nowhere.yaml: cannot be read")


def test_heads_are_tied_and_untied_on_the_way(models: Path, here: Path) -> None:
    one = made("quantize", models / "untied", "--bits", 4, "--tie", "-o", "one")
    two = made("quantize", models / "plain", "--bits", 4, "--untie", "-o", "two")
    assert HEAD not in stored(one) and HEAD in stored(two)
    told = [json.loads((out / "config.json").read_text())["tie_word_embeddings"] for out in (one, two)]
    assert told == [True, False]


def test_a_smaller_group_is_taken_only_where_that_is_allowed(here: Path) -> None:
    tiny(here / "m", hidden_size=128, intermediate_size=96, num_hidden_layers=1)
    ran = qconvert("quantize", "m", "--bits", 4)
    assert ran.code == 1 and "its rows of 96 columns" in ran.err
    found = forms(made("quantize", "m", "--bits", 4, "--allow-smaller-group"))
    assert (found[DOWN], found[Q]) == ("int4-g32", "int4-g128")


@pytest.mark.parametrize("command", ["fuse", "quantize", "convert"])
def test_inner_features_are_padded_for_ranks(command: str, here: Path) -> None:
    tiny(here / "m", hidden_size=128, intermediate_size=96, num_hidden_layers=1)
    how = {"quantize": ("--scheme", "int4-g32"), "convert": ("--to", "bf16")}.get(command, ())
    out = made(command, "m", *how, "--pad-to-tp", 4, "-o", "out")
    inner = json.loads((out / "config.json").read_text())["intermediate_size"]
    assert inner == (128 if command == "quantize" else 96)
    assert manifest(out)["recipe"]["pad_to_tp"] == 4
    if command == "quantize":
        assert manifest(out)["tensors"][DOWN]["zeros_added"] == {"rows": 0, "columns": 32}


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("command", ["quantize", "fuse", "untie"])
def test_plain_tensors_and_scales_are_rounded_to_the_dtype(
    dtype: str, command: str, models: Path, here: Path
) -> None:
    how = ("--bits", 4) if command == "quantize" else ()
    out = made(command, models / "plain", *how, "--dtype", dtype, "-o", "out")
    codes = {DType[dtype.upper()].code} | ({"I32", "I64"} if command == "quantize" else set())
    assert {kind for kind, _, _ in stored(out).values()} == codes
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == {
        "bf16": "bfloat16", "f16": "float16", "f32": "float32"
    }[dtype]  # fmt: skip


@pytest.mark.parametrize("command", ["fuse", "dequantize", "tie"])
def test_threads_and_memory_leave_every_byte_alone(command: str, models: Path, here: Path) -> None:
    source = models / {"dequantize": "quantized", "tie": "untied"}.get(command, "plain")
    few = made(command, source, "--jobs", 1, "--max-memory", "1MB", "-o", "few")
    many = made(command, source, "-j", 4, "--max-memory", "2GiB", "-o", "many")
    a, b = files_of(few), files_of(many)
    assert {n: d for n, d in a.items() if n != "README.md"} == {
        n: d for n, d in b.items() if n != "README.md"
    }


@pytest.mark.parametrize("command", ["fuse", "untie", "dequantize"])
def test_weights_are_cut_into_shards_of_a_size(command: str, models: Path, here: Path) -> None:
    source = models / ("quantized" if command == "dequantize" else "plain")
    whole = made(command, source, "-o", "whole")
    out = made(command, source, "--shard-size", "200KB", "-o", "parts")
    parts = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(parts) > 1 and parts[0] == f"model-00001-of-{len(parts):05}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(parts) and set(index["weight_map"]) == set(stored(whole))
    assert stored(out) == stored(whole)
    big = {n for n, (_, _, data) in stored(whole).items() if len(data) > 200_000}
    for part in parts:
        held = [name for name, file in index["weight_map"].items() if file == part]
        assert (out / part).stat().st_size < 210_000 or (len(held) == 1 and held[0] in big)
    assert [file["name"] for file in manifest(out)["files"]] == [*parts, "model.safetensors.index.json"]
    assert qconvert("verify", out, "--against", source).code == 0


def test_what_is_unknown_is_copied_when_that_is_allowed(here: Path) -> None:
    extra = {"adapter.weight": np.ones((4, 4), np.float32)}
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, changes=extra)
    ran = qconvert("fuse", "m")
    assert ran.code == 1 and "adapter.weight" in ran.err and "--allow-unknown" in ran.err
    out = made("fuse", "m", "--allow-unknown")
    assert stored(out)["adapter.weight"] == stored(here / "m")["adapter.weight"]


def test_nan_is_converted_when_that_is_allowed(here: Path) -> None:
    norm = np.full(128, np.nan, np.float32)
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, changes={"model.norm.weight": norm})
    ran = qconvert("fuse", "m")
    assert ran.code == 1 and "model.norm.weight: NaN or Inf at row 0, column 0" in ran.err
    out = made("fuse", "m", "--allow-nonfinite")
    assert stored(out)["model.norm.weight"] == stored(here / "m")["model.norm.weight"]


def test_only_the_named_linears_are_stacked_and_cut(models: Path, here: Path) -> None:
    out = made("fuse", models / "plain", "--only", "gate_up", "-o", "a")
    names = set(stored(out))
    assert any("gate_up_proj" in n for n in names) and Q in names
    half = made("unfuse", models / "fused", "--only", "gate_up", "-o", "b")
    assert any("qkv_proj" in n for n in stored(half)) and DOWN.replace("down", "up") in stored(half)
    ran = qconvert("fuse", models / "plain", "--only", "experts")
    assert ran.code == 1 and "no linears that could be stacked (experts)" in ran.err


@pytest.mark.parametrize(
    ("flags", "types"),
    [
        ((), {"token_embd.weight": "Q8_0", "blk.0.attn_q.weight": "Q8_0"}),
        (("--token-embedding-type", "q4_0"), {"token_embd.weight": "Q4_0", "blk.0.attn_q.weight": "Q8_0"}),
        (("--tensor-type", "attn_q=f16"), {"blk.0.attn_q.weight": "F16", "blk.0.attn_k.weight": "Q8_0"}),
        (
            ("--tensor-type", "attn_=q5_0", "--tensor-type", "ffn_down=q4_1"),
            {"blk.0.attn_k.weight": "Q5_0", "blk.0.ffn_down.weight": "Q4_1", "blk.0.ffn_up.weight": "Q8_0"},
        ),
        (("--pure",), {"token_embd.weight": "Q8_0", "blk.0.attn_norm.weight": "F32"}),
    ],
)
def test_types_of_a_gguf_are_those_that_were_asked_for(
    flags: tuple[str, ...], types: dict[str, str], models: Path, here: Path
) -> None:
    out = made("to-gguf", models / "plain", "--type", "q8_0", *flags, "-o", "m.gguf")
    found = {name: tensor.type.name for name, tensor in read_gguf(out).tensors.items()}
    assert {name: found[name] for name in types} == types


def test_the_head_of_a_gguf_has_a_type_of_its_own(models: Path, here: Path) -> None:
    how = ("--type", "q4_0", "--output-tensor-type", "q8_0")
    out = made("to-gguf", models / "untied", *how, "-o", "m.gguf")
    tied = made("to-gguf", models / "plain", *how, "-o", "n.gguf")
    kinds = [{n: t.type.name for n, t in read_gguf(file).tensors.items()} for file in (out, tied)]
    assert kinds[1]["token_embd.weight"] == "Q8_0"  # a tied head is the embedding
    assert kinds[0]["output.weight"] == "Q8_0" and kinds[0]["blk.0.attn_q.weight"] == "Q4_0"


def test_bytes_of_a_gguf_do_not_depend_on_how_it_was_made(models: Path, here: Path) -> None:
    plain = made("to-gguf", models / "plain", "--type", "q4_0", "-o", "m.gguf").read_bytes()
    for flags in (("-j", 1, "--max-memory", "1MB"), ("--no-verify",), ("--fallback",)):
        out = made("to-gguf", models / "plain", "--type", "q4_0", *flags, "-o", "m.gguf", "--overwrite")
        assert out.read_bytes() == plain


def test_a_pre_tokenizer_is_written_as_it_is_named(models: Path, here: Path) -> None:
    out = made("to-gguf", models / "plain", "--type", "f16", "--pre-tokenizer", "qwen2", "-o", "m.gguf")
    assert read_gguf(out).text("tokenizer.ggml.pre") == "qwen2"
    ran = qconvert("to-gguf", models / "plain", "--type", "f16", "--pre-tokenizer", "nonsense")
    assert ran.code == 2 and "nonsense" in ran.err


@pytest.mark.parametrize("command", ["to-gguf", "convert"])
def test_codes_are_kept_or_quantized_again_when_asked(command: str, models: Path, here: Path) -> None:
    how = ("--type", "q4_0") if command == "to-gguf" else ("--to", "gguf", "--scheme", "q4_0")
    ran = qconvert(command, models / "quantized", *how, "-o", "m.gguf")
    assert ran.code == 1 and "--allow-requantize" in ran.err and not list(here.iterdir())
    ran = qconvert(command, models / "quantized", *how, "--allow-requantize", "-o", "m.gguf", "--json")
    assert ran.code == 0 and "requantized" in ran.json["certificates"]


@pytest.mark.parametrize("layout", ["bf16", "f16", "f32"])
def test_plain_layouts_are_dtypes(layout: str, models: Path, here: Path) -> None:
    out = made("convert", models / "quantized", "--to", layout)
    assert out.name == f"quantized-{layout}"
    assert {kind for kind, _, _ in stored(out).values()} == {DType[layout.upper()].code}
    ran = qconvert("convert", models / "quantized", "--to", layout, "--scheme", "int4")
    failed(ran, f"--scheme: is not for --to {layout}", "leave it out", code=2)


def test_sources_are_hashed_whole_when_asked(models: Path, here: Path) -> None:
    whole = hashlib.sha256((models / "plain" / "model.safetensors").read_bytes()).hexdigest()
    for command, how in (("quantize", ("--bits", 4)), ("convert", ("--to", "f32")), ("untie", ())):
        out = made(command, models / "plain", *how, "--hash-sources", "-o", command)
        assert [file["sha256"] for file in manifest(out)["source"]["files"]] == [whole]
