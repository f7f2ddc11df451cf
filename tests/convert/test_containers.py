"""Both containers from the first byte to the last rename: an error at any stage leaves what was there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import qconvert as library
from qconvert.convert import batches
from qconvert.convert.containers.gguf_file import OpenGGUF
from qconvert.convert.containers.safetensors_folder import OpenFolder
from qconvert.convert.job import Job
from qconvert.convert.resume import RunJournal
from qconvert.errors import CheckFailed, OutputExists, QConvertError
from qconvert.formats.io.planned_files import FileSink
from tests.support.commands import files_of, made, qconvert
from tests.support.models import stored, tiny

ROOT = Path(__file__).resolve().parents[2]
BOTH = ("folder", "gguf")
Asked = Callable[..., tuple[Job, Path]]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 300}
    return tiny(tmp_path_factory.mktemp("source") / "m", **sizes)


@pytest.fixture
def ask(source: Path, here: Path) -> Asked:
    """A job for a container, and the name of its output."""

    def job(container: str, **options: Any) -> tuple[Job, Path]:
        model = library.open_model(str(source))
        if container == "gguf":
            request = library.Request("to-gguf", target=library.GGUFTarget("q8_0"))
            return library.prepare(model, request, library.RunOptions(**options)), here / "m.gguf"
        recipe = library.Recipe(scheme=library.parse_scheme("int4-g32"))
        request = library.Request("quantize", recipe)
        return library.prepare(model, request, library.RunOptions(**options)), here / "out"

    return job


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> Any:
        raise error

    return call


def fail_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tenth write fails, as on a disk that breaks in the middle."""
    write, count = FileSink.write, iter(range(1000))

    def sometimes(self: FileSink, *args: Any, **kwargs: Any) -> None:
        if next(count) == 9:
            raise QConvertError("the disk is gone", "plug it in")
        write(self, *args, **kwargs)

    monkeypatch.setattr(FileSink, "write", sometimes)
    monkeypatch.setattr(batches, "SMALL", 0.0)


def fail_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileSink, "commit", raising(QConvertError("the disk is gone", "plug it in")))


def flip_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk holds another byte than was written, which only verifying sees."""
    commit = FileSink.commit

    def damage(self: FileSink) -> None:
        paths = list(self._paths)
        commit(self)
        for path in paths:
            raw = bytearray(path.read_bytes())
            raw[-1] ^= 1
            path.write_bytes(raw)

    monkeypatch.setattr(FileSink, "commit", damage)


def fail_finish(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (OpenFolder, OpenGGUF):
        monkeypatch.setattr(kind, "finish", raising(KeyboardInterrupt()))


def fail_rename(monkeypatch: pytest.MonkeyPatch) -> None:
    """No name can be given any more, in whichever way the container gives it."""
    from qconvert.formats.io import output_folder

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, target: Path) -> Any:
            if "journal" not in path.name:
                raise OSError(5, "Input/output error")
            return real(path, target)

        return call

    monkeypatch.setattr(output_folder, "_exchange", raising(OSError(5, "Input/output error")))
    for owner, name in ((Path, "rename"), (Path, "replace"), (os, "link")):
        monkeypatch.setattr(owner, name, failing(getattr(owner, name)))


Failing = tuple[Callable[[pytest.MonkeyPatch], None], type[BaseException] | tuple[type[BaseException], ...]]
STAGES: dict[str, Failing] = {
    "write": (fail_write, QConvertError),
    "commit": (fail_commit, QConvertError),
    "verify": (flip_byte, CheckFailed),
    "finish": (fail_finish, KeyboardInterrupt),
    "rename": (fail_rename, (QConvertError, OSError)),
}


# After an interruption or an error of the disk, the next run goes on; at its rename, a folder has no journal.
LEFT = {
    ("finish", "folder"): {"out.partial"},
    ("finish", "gguf"): {"m.gguf.partial", "m.gguf.partial-journal"},
    ("rename", "gguf"): {"m.gguf.partial", "m.gguf.partial-journal"},
}


def unfinished(here: Path) -> set[str]:
    """What a run has left for the next one."""
    return {path.name for path in here.iterdir() if ".partial" in path.name}


def a_journal() -> RunJournal:
    return RunJournal({}, block_bytes=1 << 20, checksums=True)


@pytest.mark.parametrize("container", BOTH)
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_at_any_stage_leaves_nothing_but_what_can_be_gone_on_with(
    container: str, stage: str, ask: Asked, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, out = ask(container)
    with monkeypatch.context() as patch:
        STAGES[stage][0](patch)
        with pytest.raises(STAGES[stage][1]):
            library.execute(job, out)
    assert unfinished(here) == LEFT.get((stage, container), set()) and not out.exists()
    assert library.execute(job, out).path == out and out.exists()
    assert [path.name for path in here.iterdir()] == [out.name]


@pytest.mark.parametrize("container", BOTH)
@pytest.mark.parametrize("stage", STAGES)
def test_an_error_keeps_the_output_that_was_to_be_replaced(
    container: str, stage: str, ask: Asked, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, out = ask(container, overwrite=True)
    library.execute(job, out)
    before = contents(here)
    with monkeypatch.context() as patch:
        STAGES[stage][0](patch)
        with pytest.raises(STAGES[stage][1]):
            library.execute(job, out)
    left = unfinished(here)
    assert left == LEFT.get((stage, container), set())
    assert {name: raw for name, raw in contents(here).items() if name.split("/")[0] not in left} == before
    library.execute(job, out)
    assert contents(here).keys() == before.keys()


@pytest.mark.parametrize("container", BOTH)
def test_without_verifying_a_damaged_disk_is_not_seen(
    container: str, ask: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is what --no-verify gives up: no hash, no second look."""
    job, out = ask(container, verify=False)
    flip_byte(monkeypatch)
    result = library.execute(job, out)
    assert result.path.exists() and not result.hashes.files and not result.hashes.tensors


@pytest.mark.parametrize("container", BOTH)
def test_a_name_that_is_taken_is_refused_before_anything_is_written(
    container: str, ask: Asked, here: Path
) -> None:
    job, out = ask(container)
    library.execute(job, out)
    before = contents(here)
    with pytest.raises(OutputExists):
        job.container.check_target(out)
    with pytest.raises(OutputExists), job.container.create(out, a_journal()):
        raise AssertionError("opened")
    assert contents(here) == before


@pytest.mark.parametrize("container", BOTH)
def test_two_runs_to_one_name_do_not_meet(container: str, ask: Asked, here: Path) -> None:
    job, out = ask(container)
    with job.container.create(out, a_journal()), pytest.raises(QConvertError):
        library.execute(ask(container)[0], out)
    with suppress(OutputExists):
        library.execute(job, out)
    assert {path.name.split(".")[-1] for path in here.iterdir()} <= {"out", "gguf"}


@pytest.mark.parametrize("container", BOTH)
def test_the_planned_files_are_those_on_the_disk_to_the_byte(container: str, ask: Asked) -> None:
    job, out = ask(container)
    result = library.execute(job, out)
    folder = out if container == "folder" else out.parent
    for plan in job.container.files(out):
        raw = (folder / plan.name).read_bytes()
        assert len(raw) == plan.size and raw.startswith(plan.head)
    sizes = sum(file.size for file in job.container.files(out))
    assert sizes - 20_000 < job.container.bytes_needed <= sizes + 50_000
    assert set(result.hashes.files) == {plan.name for plan in job.container.files(out)}


@pytest.mark.parametrize("container", BOTH)
def test_every_block_is_heard_of_once(container: str, ask: Asked) -> None:
    job, out = ask(container)
    heard: list[tuple[str, bool]] = []
    library.execute(job, out, lambda done: heard.append((done.unit.output.name, done.last)))
    finished = [name for name, last in heard if last]
    assert sorted(finished) == sorted(job.compiled.outputs) and len(set(finished)) == len(finished)


def test_a_listener_that_fails_ends_the_run_and_leaves_nothing(ask: Asked, here: Path) -> None:
    for container in BOTH:
        job, out = ask(container)
        with pytest.raises(ZeroDivisionError):
            library.execute(job, out, raising(ZeroDivisionError()))
        assert list(here.iterdir()) == []


SCHEMA = json.loads((ROOT / "qconvert" / "manifest.schema.json").read_text())
WISHES = (
    "quantize plain --bits 4 --rule mlp.down=int8 --keep attn.o --asym",
    "quantize plain --bits 4 --layout mlx --group-size 64 --fuse gate_up",
    "quantize plain --bits 3 --min-max --pad-to-tp 4",
    "convert quantized --to gptq",
    "convert plain --to bitsandbytes --scheme nf4-nested",
    "convert plain --to compressed-tensors --scheme nvfp4",
    "convert quantized --to awq --allow-requantize --scheme int4-g128",
    "dequantize quantized --dtype f32 --hash-sources",
    "fuse plain --shard-size 100KB --no-verify",
    "untie plain --dtype f16",
)


@pytest.mark.parametrize("wish", WISHES)
def test_manifests_are_what_their_schema_says(wish: str, models: Path, here: Path) -> None:
    command, model, *flags = wish.split()
    out = made(command, models / model, *flags, "-o", "out")
    record = json.loads((out / "qconvert.json").read_text())
    jsonschema.Draft202012Validator(SCHEMA).validate(record)
    arrays = stored(out)
    assert {part for entry in record["tensors"].values() for part in entry["parts"]} == set(arrays)
    assert record["command"] == command and record["totals"]["tensors"] == len(record["tensors"])
    kinds = {entry["certificate"]["kind"] for entry in record["tensors"].values()}
    assert all(
        entry["exact"] == (entry["certificate"]["kind"] == "exact") for entry in record["tensors"].values()
    )
    assert ("error" in json.dumps(record["tensors"])) == bool(kinds & {"quantized", "requantized"})
    assert record["verified"] is ("--no-verify" not in flags)


@pytest.mark.parametrize("wish", WISHES)
def test_a_card_says_where_from_how_large_and_how_to_load(wish: str, models: Path, here: Path) -> None:
    import yaml

    command, model, *flags = wish.split()
    out = made(command, models / model, *flags, "-o", "out")
    card, record = (out / "README.md").read_text(), json.loads((out / "qconvert.json").read_text())
    _, header, body = card.split("---\n", 2)
    said = yaml.safe_load(header)
    lost = record["totals"]["relative_rms_error"]
    assert said["library_name"] == "transformers" and said["tags"][0] == "qconvert"
    assert (record["recipe"]["layout"] in said["tags"]) == (lost is not None)
    assert body.startswith("# out\n") and f"Made from `{model}`" in body and f"(`qconvert {command}`)" in body
    assert f"{record['totals']['parameters']:,} parameters" in body and "## Loading" in body
    assert (f"error of the quantized weights {lost:.4f}." in body) if lost is not None else True
    exact = all(entry["exact"] for entry in record["tensors"].values())
    assert ("All numbers, or their codes and scales, are those of the source." in body) == (
        exact and lost is None
    )
    recipe = yaml.safe_load(body.split("```yaml\n")[1].split("```")[0])
    asked = {key: value for key, value in record.get("conversion", {}).items() if value}
    assert recipe.items() <= {**record["recipe"], **asked}.items() and asked.keys() <= recipe.keys()


def test_a_failed_command_says_why_and_leaves_nothing(models: Path, here: Path) -> None:
    """As a user meets it: exit code 3 for a disk that holds other bytes, and no folder."""
    with pytest.MonkeyPatch.context() as patch:
        flip_byte(patch)
        for command, how in (("fuse", ()), ("to-gguf", ("--type", "q8_0"))):
            ran = qconvert(command, models / "plain", *how)
            assert ran.code == 3 and ran.out == "" and ran.err.splitlines()[-2].startswith("Error: ")
    assert list(here.iterdir()) == []


def test_two_runs_write_the_same_bytes(models: Path, here: Path) -> None:
    one, two = (made("quantize", models / "plain", "--bits", 4, "-o", name) for name in ("one", "two"))
    a, b = files_of(one), files_of(two)
    assert a.keys() == b.keys() and {n for n in a if a[n] != b[n]} <= {"README.md"}
    assert a["README.md"].replace(b"# one", b"# two") == b["README.md"]


def test_a_rename_that_fails_takes_the_other_parts_back(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GGUF in parts the first is named last."""
    source = tiny(here.parent / "m", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    request = library.Request("to-gguf", target=library.GGUFTarget("f16"))
    job = library.prepare(library.open_model(str(source)), request, library.RunOptions(shard_size=50_000))
    link, rename = os.link, Path.rename

    def linked(a: Path, b: Path) -> None:
        if "-00001-of-" in str(b):
            raise OSError(5, "Input/output error", str(b))
        link(a, b)

    def renamed(self: Path, target: Path) -> Path:
        if "-00001-of-" in str(target):
            raise OSError(5, "Input/output error", str(target))
        return rename(self, target)

    monkeypatch.setattr(os, "link", linked)
    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(QConvertError, match="cannot be named"):
        library.execute(job, here / "m.gguf")
    assert {path.suffix for path in here.iterdir()} == {".partial", ".partial-journal"}
    monkeypatch.undo()
    heard: list[str] = []
    library.execute(job, here / "m.gguf", opened=lambda journal: heard.append(f"{journal.share:.2f}"))
    assert heard == ["1.00"] and {path.suffix for path in here.iterdir()} == {".gguf"}
