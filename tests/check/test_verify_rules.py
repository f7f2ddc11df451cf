"""What `verify` accepts and complains of, and what is read of a source before planning."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

import qconvert as library
from qconvert.check.verify import Verification, verify
from qconvert.checkpoint import facts as gathering
from qconvert.checkpoint.facts import can_absorb_divisor, column_groups, compare_head, gather_facts
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.errors import CorruptCheckpoint
from qconvert.plan.facts import SourceFacts
from tests.support.commands import made
from tests.support.models import EMBED, HEAD, tiny, tiny_arrays, tiny_config

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "vocab_size": 300,
}
Q, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("source") / "m", dtype="f32", **SIZES)


def checked(out: Path, against: Path | None = None) -> Verification:
    return verify(open_checkpoint(out), open_checkpoint(against) if against else None)


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The folder with other arrays, without the manifest that would tell."""
    file = folder / "model.safetensors"
    arrays = load_torch(file)
    change(arrays)
    save_torch(arrays, file, {"format": "pt"})
    (folder / "qconvert.json").unlink(missing_ok=True)
    return folder


def test_an_output_that_is_what_it_promises_has_no_problems(source: Path, here: Path) -> None:
    out = made("quantize", source, "--scheme", "int4-g32", "-o", "out")
    found = checked(out, source)
    assert found.problems == () and found.warnings == ()
    assert found.findings["compared"] == {"equal": 6, "differs": 7}
    assert found.findings["manifest"] == "1 file and 27 arrays"


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rounding_to_the_outputs_type_is_no_difference(dtype: str, source: Path, here: Path) -> None:
    out = made("fuse", source, "--dtype", dtype, "-o", "out")
    assert checked(out, source).problems == ()

    def nudge(arrays: dict[str, Any]) -> None:
        arrays[NORM][3] *= 1.01

    assert checked(changed(out, nudge), source).problems[0].startswith(f"{NORM}: differs from the source")


def test_every_kind_of_difference_names_its_tensor(source: Path, here: Path) -> None:
    out = made("untie", source, "-o", "out")
    assert checked(out, source).problems == ()

    def swap(arrays: dict[str, Any]) -> None:
        arrays[Q] = arrays[Q].flip(0).contiguous()
        arrays[HEAD] = arrays[HEAD] * 2

    problems = checked(changed(out, swap), source).problems
    assert [problem.split(":")[0] for problem in problems] == [Q, HEAD]
    assert "relative RMS 1." in problems[0]


@pytest.mark.parametrize("scheme", ["int2-g32", "int3-channel", "int8-asym-g64"])
def test_a_shifted_row_of_a_quantized_weight_is_seen(scheme: str, source: Path, here: Path) -> None:
    out = made("quantize", source, "--scheme", scheme, "-o", "out")
    assert checked(out, source).problems == ()

    def shift(arrays: dict[str, Any]) -> None:
        arrays[f"{DOWN}_packed"] = arrays[f"{DOWN}_packed"].roll(1, 0).contiguous()

    assert checked(changed(out, shift), source).problems[0].startswith(f"{DOWN}: differs from the source")


def test_sizes_hashes_and_forms_are_held_against_the_manifest(source: Path, here: Path) -> None:
    out = made("quantize", source, "--scheme", "int4-g32", "-o", "out")
    path = out / "qconvert.json"
    whole = json.loads(path.read_text())

    def problems(change: Callable[[Any], None]) -> tuple[str, ...]:
        record = json.loads(json.dumps(whole))
        change(record)
        path.write_text(json.dumps(record))
        return checked(out).problems

    file = whole["files"][0]
    assert problems(lambda r: None) == ()
    assert problems(lambda r: r["files"][0].update(bytes=1)) == (
        f"model.safetensors: {file['bytes']} bytes, the manifest says 1",
    )
    other = "0" * 64
    told = "model.safetensors: its SHA-256 is not the manifest's"
    assert problems(lambda r: r["files"][0].update(sha256=other)) == (told,)
    assert problems(lambda r: r["tensors"][NORM]["parts"].update({NORM: other})) == (
        f"{NORM}: its SHA-256 is not the manifest's",
    )
    assert problems(lambda r: r["tensors"][DOWN].update(form="int8-g32")) == (
        f"{DOWN}: int4-g32, the manifest says int8-g32",
    )
    missing = problems(lambda r: r["tensors"].update(ghost=r["tensors"][NORM]))
    assert missing == ("ghost: nothing, the manifest says f32",)
    outside = problems(lambda r: r["files"].append({**file, "name": "../m/config.json"}))
    assert outside == ("../m/config.json: named in qconvert.json, but not here",)
    with pytest.raises(CorruptCheckpoint, match=r"qconvert\.json: not a manifest of qconvert"):
        problems(lambda r: r.pop("files"))


def test_a_manifest_with_a_name_that_no_disk_can_have(source: Path, here: Path) -> None:
    out = made("quantize", source, "--scheme", "int4-g32", "-o", "long")
    manifest = out / "qconvert.json"
    said = json.loads(manifest.read_text())
    said["files"][0]["name"] = "a" * 5000
    manifest.write_text(json.dumps(said))
    problems = verify(open_checkpoint(out)).problems
    assert any(problem.endswith("named in qconvert.json, but not here") for problem in problems)


def test_numbers_that_are_none_are_named_in_every_form(source: Path, here: Path) -> None:
    plain = made("quantize", source, "--scheme", "int4-g32", "-o", "out")

    def spoil(arrays: dict[str, Any]) -> None:
        arrays[NORM][0] = float("nan")
        arrays[f"{DOWN}_scale"][2, 1] = float("inf")

    problems = checked(changed(plain, spoil)).problems
    assert set(problems) == {f"{NORM}: NaN or Inf", f"{DOWN}_scale: NaN or Inf"}
    assert "none (structure and numbers checked)" in checked(plain).findings["manifest"]


def test_blocks_that_decode_to_nan_are_named(source: Path, here: Path) -> None:
    out = made("to-gguf", source, "--type", "q8_0", "-o", "m.gguf")
    assert checked(out).problems == () and checked(out, source).problems == ()
    from qconvert.formats.gguf.header import read_gguf

    start, raw = read_gguf(out).offsets["blk.0.ffn_down.weight"], bytearray(out.read_bytes())
    raw[start : start + 2] = np.array([np.nan], "<f2").tobytes()
    out.write_bytes(raw)
    assert checked(out).problems == ("blk.0.ffn_down.weight: NaN or Inf",)


# What is read of a source before planning.


class Reads:
    """Counts the blocks that are read of a checkpoint's tensors."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.names = checkpoint, list[str]()

    def __getattr__(self, name: str) -> Any:
        if name == "reader":
            return self
        return getattr(self.checkpoint, name)

    def read(self, tensor: Any, start: int, stop: int) -> Any:
        self.names.append(tensor.name)
        return self.checkpoint.reader.read(tensor, start, stop)


def test_most_requests_depend_on_no_number(source: Path) -> None:
    checkpoint = open_checkpoint(source)
    reads = Reads(checkpoint)
    for request in (
        library.Request("fuse", library.Recipe(fuse=("qkv",))),
        library.Request("quantize", library.Recipe(scheme=library.parse_scheme("int4"))),
        library.Request("untie", library.Recipe(tie=False)),
        library.Request("convert", target=library.Target("mlx")),
        library.Request("to-gguf", target=library.GGUFTarget("q8_0", undo_act_order=True)),
    ):
        found = gather_facts(reads, checkpoint.bind(), request)  # type: ignore[arg-type]
        assert found == SourceFacts() and reads.names == []


@pytest.mark.parametrize("where", [0, 299])
def test_heads_are_compared_number_by_number(
    where: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of a few rows: the count, and the largest difference, wherever it is."""
    monkeypatch.setattr(gathering, "_BLOCK_WEIGHTS", 640)
    head = tiny_arrays(tiny_config(**SIZES))[EMBED].copy()
    head[where, :3] += np.array([0.5, -2.0, 0.25], np.float32)
    folder = tiny(tmp_path / "m", tied=False, dtype="f32", changes={HEAD: head}, **SIZES)
    found = compare_head(open_checkpoint(folder))
    assert (found.count, found.differing) == (300 * 64, 3) and found.max_abs == pytest.approx(2)
    equal = tiny(
        tmp_path / "e", tied=False, changes={HEAD: tiny_arrays(tiny_config(**SIZES))[EMBED]}, **SIZES
    )
    assert compare_head(open_checkpoint(equal)).differing == 0


def test_a_head_is_looked_at_only_where_tying_is_in_question(tmp_path: Path) -> None:
    same = tiny_arrays(tiny_config(**SIZES))[EMBED]
    folder = tiny(tmp_path / "m", tied=False, changes={HEAD: same}, **SIZES)
    checkpoint = open_checkpoint(folder)
    for tie, looks in ((True, True), (False, False), (None, False)):
        reads = Reads(checkpoint)
        request = library.Request("tie", library.Recipe(tie=tie))
        found = gather_facts(reads, checkpoint.bind(), request)  # type: ignore[arg-type]
        assert (found.head is not None) is looks is bool(reads.names)
        assert not looks or set(reads.names) == {EMBED, HEAD}


def test_groups_of_columns_are_those_of_the_file(source: Path, here: Path) -> None:
    out = made("convert", source, "--to", "gptq", "--scheme", "int4-g32", "-o", "gptq")
    assert column_groups(open_checkpoint(out)) == {}
    file, order = out / "model.safetensors", np.random.default_rng(0).permutation(np.arange(64) // 32)
    arrays = load_file(file)
    import safetensors.numpy

    arrays["model.layers.0.mlp.down_proj.g_idx"] = order.astype(np.int32)
    safetensors.numpy.save_file(arrays, file, {"format": "pt"})
    assert column_groups(open_checkpoint(out)) == {DOWN: tuple(order.tolist())}


def test_a_divisor_is_absorbed_only_where_every_scale_stays_a_number(here: Path) -> None:
    model = tiny(here / "m", **SIZES)
    out = made("convert", model, "--to", "compressed-tensors", "--scheme", "nvfp4", "-o", "nv")
    checkpoint = open_checkpoint(out)
    weights = [t for n, t in checkpoint.tensors.items() if n.endswith("_proj.weight")]
    assert weights and not any(can_absorb_divisor(checkpoint, tensor) for tensor in weights)
    assert not can_absorb_divisor(checkpoint, checkpoint.tensors[NORM])
    name = next(n for n in load_torch(out / "model.safetensors") if n.startswith(DOWN) and "global" in n)
    for power, absorbs in ((1.0, True), (2.0**30, False), (3.0, False)):

        def divide(arrays: dict[str, Any], power: float = power) -> None:
            arrays[name].fill_(power)

        found = open_checkpoint(changed(out, divide))
        assert can_absorb_divisor(found, found.tensors[DOWN]) is absorbs
    request = library.Request("convert", target=library.Target("mlx"))
    one = open_checkpoint(changed(out, lambda arrays: arrays[name].fill_(1.0) and None))
    assert gather_facts(one, one.bind(), request).absorbable_divisors == {DOWN}
