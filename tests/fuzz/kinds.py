"""The kinds of files that are changed: sound ones to begin with, how they are changed, and who reads them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from qconvert.calibrate.imatrix import open_imatrix
from qconvert.calibrate.statistics_file import open_statistics
from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import open_checkpoint
from qconvert.checkpoint.resolved import open_found
from qconvert.cli.inspect import describe
from qconvert.convert.resume import RunJournal
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.formats.huggingface.safetensors_file import SafetensorsFile
from qconvert.formats.io import journal
from qconvert.formats.tokenizers.to_gguf import read_tokenizer
from qconvert.formats.tokenizers.tokenized_text import open_tokenizer
from qconvert.models import Architecture
from qconvert.plan.recipe import load_recipe
from tests.fuzz.commands import drive_folder, drive_gguf, drive_part, folders, ggufs
from tests.fuzz.mutations import changed_bytes, changed_json, changed_value
from tests.gguf.test_gguf_kimi import as_published, kimi
from tests.models.test_deepseek_v4 import published
from tests.support.adapters import lora_arrays, write_peft
from tests.support.commands import made
from tests.support.gguf_models import imatrix_dat
from tests.support.models import tiny

Change = Callable[[bytes, random.Random], bytes]
SIZES = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
_JOB = {"source": {"name": "m", "sha256": "0" * 64}, "plan": {"units": 2}}


@dataclass(frozen=True)
class Kind:
    """A kind of file: sound ones, each in a place where `read` finds it, and the change of its bytes.

    `read` gets the path of the changed file, and may raise QConvertError alone. Of `share` kinds that are
    changed in turn, this one is that many.
    """

    files: tuple[Path, ...]
    change: Change
    read: Callable[[Path], object]
    share: int = 1
    sound: Mapping[Path, bytes] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sound", {path: path.read_bytes() for path in self.files})

    def once(self, rng: random.Random) -> tuple[Path, bytes]:
        """Change one of the files, on the disk; returns it and what it holds now."""
        path = rng.choice(self.files)
        raw = self.change(self.sound[path], rng)
        _overwrite(path, raw)
        return path, raw

    def restore(self, path: Path) -> None:
        _overwrite(path, self.sound[path])


def _overwrite(path: Path, raw: bytes) -> None:
    """Put other bytes into a file: ext4 writes one that is emptied first to the disk when it is closed."""
    with path.open("r+b") as file:
        file.write(raw)
        file.truncate()


def kinds(folder: Path) -> dict[str, Kind]:
    """All kinds, with their files under `folder`."""
    plain = tiny(folder / "plain", **SIZES)
    sharded = tiny(folder / "sharded", shards=3, **SIZES)
    files = {
        name: tiny(folder / name, **SIZES) for name in ("config", "tokenizer", "statistics_of", "manifest_of")
    }
    quantized = made("quantize", files["manifest_of"], "--scheme", "int8-g32", "-o", folder / "quantized")
    gguf = made("to-gguf", plain, "--type", "q8_0", "-o", folder / "m.gguf")
    architecture = open_checkpoint(plain).architecture
    return {
        "safetensors": Kind((plain / "model.safetensors",), _changed_header, _read_safetensors),
        "config.json": Kind((files["config"] / "config.json",), changed_json, _read_model),
        "quantized config.json": Kind((quantized / "config.json",), changed_json, _read_model),
        "index": Kind((sharded / "model.safetensors.index.json",), changed_json, _read_model),
        "GGUF": Kind((gguf,), _changed_start, _read_gguf),
        "tokenizer": Kind(
            tuple(files["tokenizer"] / name for name in ("tokenizer.json", "tokenizer_config.json")),
            changed_json,
            _read_tokenizer,
        ),
        "imatrix": Kind(_imatrices(folder), changed_bytes, lambda path: _read_imatrix(path, architecture)),
        "statistics": Kind(
            (_statistics(folder, files["statistics_of"]),),
            _changed_header,
            lambda path: open_statistics(path, architecture),
        ),
        "journal": Kind((_journal(folder),), _changed_journal, _read_journal),
        "manifest": Kind((quantized / "qconvert.json",), changed_json, _read_manifest),
        "recipe": Kind((_recipe(folder),), changed_bytes, load_recipe),
        "layouts": Kind(_of_layouts(folder / "layouts"), _changed_folder, drive_folder, share=4),
        "GGUF types": Kind(_of_types(folder / "types"), _changed_start, drive_gguf, share=3),
        "adapters": Kind(
            _of_adapter(folder / "adapter", plain), _changed_folder, lambda path: _read_adapter(path, plain)
        ),
        "families": Kind(_of_families(folder / "families"), _changed_folder, drive_folder),
        "GGUF in parts": Kind(_in_parts(plain, folder / "parts"), _changed_start, drive_part),
    }


def _of_layouts(folder: Path) -> tuple[Path, ...]:
    names = ("config.json", "model.safetensors")
    return tuple(
        each / name for each in folders(folder, {**SIZES, "intermediate_size": 64}) for name in names
    )


def _of_adapter(folder: Path, base: Path) -> tuple[Path, ...]:
    shapes = {f"model.layers.0.{name}": (64, 64) for name in ("self_attn.q_proj", "self_attn.o_proj")}
    write_peft(folder, lora_arrays(shapes, 4), base, alpha_pattern={"q_proj": 2}, use_rslora=True)
    return folder / "adapter_config.json", folder / "adapter_model.safetensors"


def _of_types(folder: Path) -> tuple[Path, ...]:
    folder.mkdir()
    return tuple(ggufs(folder))


def _of_families(folder: Path) -> tuple[Path, ...]:
    """Models whose readers have most to ask of a config.json: as Moonshot and DeepSeek publish them."""
    kimi_linear, deepseek = folder / "kimi-linear", folder / "deepseek-v4"
    deepseek.mkdir(parents=True)
    kimi(kimi_linear)
    as_published(kimi_linear)
    published(deepseek)
    return tuple(
        each / name for each in (kimi_linear, deepseek) for name in ("config.json", "model.safetensors")
    )


def _in_parts(model: Path, folder: Path) -> tuple[Path, ...]:
    folder.mkdir()
    first = made("to-gguf", model, "--type", "q8_0", "--split-max-size", "20KB", "-o", folder / "m.gguf")
    return tuple(sorted(first.parent.iterdir()))


def _changed_folder(raw: bytes, rng: random.Random) -> bytes:
    """A config.json or a safetensors file."""
    return changed_json(raw, rng) if raw[:1] == b"{" else _changed_header(raw, rng)


def _changed_start(raw: bytes, rng: random.Random) -> bytes:
    """Most changes in the first part of a file, where headers are."""
    head = min(len(raw), rng.choice((64, 600, 4096, len(raw))))
    return changed_bytes(raw[:head], rng) + raw[head:]


def _changed_header(raw: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header, mostly of the right length."""
    if rng.random() < 0.3:
        return _changed_start(raw, rng)
    length = int.from_bytes(raw[:8], "little")
    header = changed_json(raw[8 : 8 + length], rng)
    return len(header).to_bytes(8, "little") + header + raw[8 + length :]


def _changed_journal(raw: bytes, rng: random.Random) -> bytes:
    """Other bytes, or other records under right checksums."""
    if rng.random() < 0.4:
        return changed_bytes(raw, rng)
    records = [json.loads(line.partition(b" ")[2]) for line in raw.splitlines()]
    at = rng.randrange(len(records))
    records[at] = _other(records[at], rng)
    salt = str(records[0][-1] if records[0] else "").encode("utf-8", "replace").decode()
    return b"".join(journal.packed(salt, each) for each in records)


def _other(record: object, rng: random.Random) -> list[object]:
    found = changed_value(record, rng)
    return found if isinstance(found, list) else [found]


def _imatrices(folder: Path) -> tuple[Path, ...]:
    (folder / "i.dat").write_bytes(imatrix_dat({"blk.0.attn_q.weight": (1, [1.0] * 64)}))
    return (folder / "i.dat",)


def _statistics(folder: Path, model: Path) -> Path:
    text = folder / "text.txt"
    text.write_text("some words to be measured, and some more of them. " * 40)
    out = folder / "statistics.safetensors"
    made("calibrate", model, "--text", text, "--tokens", 256, "--window", 64, "-o", out)
    return out


def _journal(folder: Path) -> Path:
    path = folder / journal.FILE_NAME
    salt = "00112233"
    part = ["w", 0, 4, 8, 12345, 0]
    records: list[journal.Record] = [
        ["h", _JOB, {"block_bytes": 1 << 20}, salt],
        ["b", "w", 0, 4, 64, [1.0, 2.0, 0.5, 0.5, 3, -1, 0], 0.0, None, [part]],
        ["n", "found", [1, 2]],
        ["c", 2],
    ]
    path.write_bytes(b"".join(journal.packed(salt, record) for record in records))
    (folder / "w.partial").write_bytes(bytes(64))
    return path


def _recipe(folder: Path) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(
        "scheme: int4-g32\nrules:\n- {select: mlp.down, scheme: int8}\nkeep: [lm_head]\n"
        "fuse: [qkv]\npad_to_tp: 2\n"
        "architecture:\n  like: qwen3\n  rename: {model.layers: model.blocks}\n  keys: {a: b}\n"
        "  slots:\n  - {role: attn.x, module: 'layers.{layer}.x', shape: [head_dim, 3], kind: norm}\n"
    )
    return path


def _read_adapter(path: Path, base: Path) -> None:
    """Read every tensor of the merged model; whatever a config calls the base, it is this one."""
    checkpoint = open_found(resolve(f"{base}+{path.parent}"))
    try:
        describe(checkpoint, list_tensors=True)
        for tensor in checkpoint.tensors.values():
            checkpoint.reader.read(tensor, 0, tensor.rows)
    finally:
        checkpoint.files.close()


def _read_model(path: Path) -> None:
    describe(open_checkpoint(path.parent), list_tensors=True)


def _read_safetensors(path: Path) -> None:
    with SafetensorsFile(path) as file:
        for name, spec in file.header.specs.items():
            file.read(name, 0, min(spec.rows, 4))
    _read_model(path)


def _read_gguf(path: Path) -> None:
    with GGUFFile(path) as file:
        for name, spec in file.specs.items():
            file.read(name, 0, min(spec.rows, 4))
    describe(open_checkpoint(path), list_tensors=True)


def _read_tokenizer(path: Path) -> None:
    config = json.loads((path.parent / "config.json").read_bytes())
    try:
        read_tokenizer(path.parent, 320, config, "gpt-2")
    finally:
        open_tokenizer(path.parent).encode("Hello, world 123")


def _read_imatrix(path: Path, architecture: Architecture) -> None:
    open_imatrix(path, architecture)


def _read_journal(path: Path) -> None:
    partial = path.parent / "w.partial"
    run = RunJournal(_JOB, block_bytes=1 << 20, checksums=True)
    raw = path.read_bytes()
    try:
        run.goes_on(path, {partial: 64}, partial)
    finally:
        path.write_bytes(raw)


def _read_manifest(path: Path) -> None:
    from qconvert.check.audit import errors_in, reordered_in, scaling_in
    from qconvert.check.verify import verify

    checkpoint = open_checkpoint(path.parent)
    verify(checkpoint)
    errors_in(checkpoint), reordered_in(checkpoint), scaling_in(checkpoint)
