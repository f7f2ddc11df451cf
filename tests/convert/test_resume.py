"""A command that goes on: what it says, what it refuses, and that nothing tells its output from another."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qconvert as library
from qconvert.cli import signals
from qconvert.convert import identity
from qconvert.convert.identity import sample_hash
from qconvert.convert.outcome import BlockDone
from qconvert.core import version
from qconvert.errors import QConvertError
from qconvert.formats.io import planned_files
from qconvert.formats.io.journal import first_difference
from tests.support.commands import Ran, made, qconvert
from tests.support.crashes import groups_of, journal_of, tree
from tests.support.models import tiny

SIZES = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 2000, "num_hidden_layers": 2}
KINDS: dict[str, tuple[tuple[object, ...], str]] = {
    "folder": (("quantize", "m", "--bits", 4, "--group-size", 32), "out"),
    "shards": (("quantize", "m", "--bits", 8, "--group-size", 32, "--shard-size", "100KB"), "out"),
    "gptq": (("quantize", "m", "--bits", 4, "--group-size", 32, "--layout", "gptq"), "out"),
    "gguf": (("to-gguf", "m", "--type", "q8_0"), "m.gguf"),
    "parts": (("to-gguf", "m", "--type", "q4_0", "--split-max-size", "100KB"), "m.gguf"),
    "nvfp4": (("convert", "m", "--to", "compressed-tensors", "--scheme", "nvfp4"), "out"),
}


@pytest.fixture
def model(here: Path) -> Path:
    return tiny(here / "m", "qwen3", **SIZES)


@pytest.fixture(autouse=True)
def small_groups() -> Iterator[None]:
    with groups_of(1):
        yield


def stopped(args: tuple[object, ...], out: Path, after: int = 12) -> None:
    """Carry out a command until so many blocks are done, then end it as an interruption does."""
    from unittest.mock import patch

    from qconvert.convert import execute as module

    run = module.run

    def some(*given: Any, **more: Any) -> Iterator[BlockDone]:
        for number, done in enumerate(run(*given, **more), 1):
            yield done
            if number == after:
                raise KeyboardInterrupt

    with patch.object(module, "run", some):
        ran = qconvert(*args, "-o", out)
    assert ran.code == 130 and "run the same command to continue" in ran.err, ran.err


@pytest.mark.parametrize("kind", KINDS)
def test_an_output_in_two_runs_is_that_of_one(kind: str, model: Path, here: Path) -> None:
    """Manifest included, whatever the numbers of threads, and the memory, of the two."""
    command, name = KINDS[kind]
    (here / "whole").mkdir()
    made(*command, "-j", 2, "-o", here / "whole" / name)
    (here / "two").mkdir()
    stopped((*command, "-j", 1, "--max-memory", "1GB"), here / "two" / name)
    ran = qconvert(*command, "-j", 2, "--max-memory", "20MB", "-o", here / "two" / name)
    assert ran.code == 0 and "resuming two" in ran.err and " % was done\n" in ran.err, ran.err
    assert tree(here / "two") == tree(here / "whole")


def test_nothing_that_is_done_is_done_again(model: Path, here: Path) -> None:
    command, name = KINDS["folder"]
    stopped(command, here / name)
    found = journal_of(here / name)
    assert found is not None
    done = {(record[1], record[2]) for record in found.records}
    job = library.prepare(
        library.open_model("m"),
        library.Request("quantize", library.Recipe(scheme=library.parse_scheme("int4-g32"))),
        library.RunOptions(),
    )
    heard: list[BlockDone] = []
    written: list[str] = []
    write = planned_files.FileSink.write

    def watched(self: Any, name: str, start: int, rows: Any, column: int = 0) -> None:
        written.append(name)
        write(self, name, start, rows, column)

    planned_files.FileSink.write = watched  # type: ignore[method-assign]
    try:
        library.execute(job, here / name, heard.append)
    finally:
        planned_files.FileSink.write = write  # type: ignore[method-assign]
    assert len(done) == 12 and {(each.unit.output.name, each.start) for each in heard[:12]} == done
    assert not {part.name for each in heard[:12] for part in each.parts} & set(written)
    assert len([each for each in heard if each.last]) == len(job.compiled.plan.units)


def test_blocks_without_checksums_are_made_again_to_be_verified(model: Path, here: Path) -> None:
    command, name = KINDS["gguf"]
    stopped((*command, "--no-verify"), here / name)
    made(*command, "-o", here / name)
    whole = made(*command, "-o", here / "whole.gguf")
    assert (here / name).read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("after", [1, 12, 20])
@pytest.mark.parametrize("kind", ["folder", "gptq", "gguf"])
def test_what_is_left_of_tensors_made_together_is_gone_on_with(
    kind: str, after: int, model: Path, here: Path
) -> None:
    command, name = KINDS[kind]
    whole = made(*command, "-o", here / "whole" / name)  # each by itself
    with groups_of(1, together=True):
        stopped(command, here / name, after)
        left = journal_of(here / name)
        made(*command, "-o", here / name)
    assert left is not None and 0 < len(left.records) <= after
    assert contents(here / name) == contents(whole)


def contents(out: Path) -> dict[str, bytes]:
    return tree(out) if out.is_dir() else {"": out.read_bytes()}


# What is refused


def changed(model: Path) -> None:
    """The same model but for its numbers: a fine-tune has the same header."""
    raw = (model / "model.safetensors").read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    numbers = np.frombuffer(raw, "<u2", offset=begin) ^ 1
    (model / "model.safetensors").write_bytes(raw[:begin] + numbers.tobytes())


def refused(ran: Ran, out: str, before: dict[str, bytes], here: Path) -> str:
    assert ran.code == 1 and tree(here / "o") == before, ran.err
    fact, hint = ran.err.splitlines()[-2:]
    assert fact.startswith(f"Error: {here / 'o' / out}") or fact.startswith(f"Error: o/{out}"), fact
    assert "--restart, to discard it" in hint
    return fact.split("whose ")[1]


def test_what_a_gguf_file_was_to_be_is_told_in_the_words_of_its_user(model: Path, here: Path) -> None:
    command, out = ("to-gguf", "m", "--type", "q8_0"), here / "o" / "out.gguf"
    out.parent.mkdir()
    stopped(command, out)
    ran = qconvert(*command[:3], "q4_0", "-o", out)
    assert ran.code == 1 and "(" not in ran.err.splitlines()[-2]
    assert "another job, whose request target file type was q8_0, and is q4_0 now" in ran.err


def test_statistics_that_only_one_of_two_jobs_has_are_told_in_a_word() -> None:
    before = {"statistics": {"damping": 0.01, "method": "feedback", "sha256": "0" * 64}}
    said = first_difference(before, {"statistics": None})
    assert said == "statistics was given (feedback), and is not given now"


def test_another_job_is_refused_and_its_work_untouched(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, out = KINDS["folder"][0], here / "o" / "out"
    out.parent.mkdir()
    stopped(command, out)
    before = tree(here / "o")
    said = refused(qconvert(*command[:3], 8, *command[4:], "-o", out), "out.partial", before, here)
    assert said == "request recipe scheme was int4-g32, and is int8-g32 now"
    said = refused(qconvert("fuse", "m", "-o", out), "out.partial", before, here)
    assert "request command was" in said and "fuse" in said
    said = refused(qconvert(*command, "--dtype", "f16", "-o", out), "out.partial", before, here)
    assert "request dtype was" in said
    with monkeypatch.context() as patch:
        patch.setattr(identity, "NUMERICS", 77)
        said = refused(qconvert(*command, "-o", out), "out.partial", before, here)
        assert said == f"version numerics was {version.NUMERICS}, and is 77 now"
    with monkeypatch.context() as patch:
        patch.setattr("qconvert.convert.precompile.fingerprint", lambda plan: "other")
        said = refused(qconvert(*command, "-o", out), "out.partial", before, here)
        assert said.startswith("kernels was ") and said.endswith(", and is other now")
    changed(model)
    said = refused(qconvert(*command, "-o", out), "out.partial", before, here)
    assert said == "source model.safetensors has changed since"
    ran = qconvert(*command, "-o", out, "--restart")
    assert ran.code == 0 and "resuming" not in ran.err
    assert tree(out)["model.safetensors"] == tree(made(*command, "-o", here / "x"))["model.safetensors"]


def test_other_statistics_are_another_job(model: Path, here: Path) -> None:
    for number, texts in enumerate(("a b c d e f g h " * 50, "x y z " * 70)):
        (here / f"{number}.txt").write_text(texts)
        calibrated = qconvert(
            "calibrate", "embedded", "--text", f"{number}.txt", "--imatrix", f"{number}.gguf", "--window", 32
        )
        assert calibrated.code == 0, calibrated.err
    command = ("to-gguf", "embedded", "--type", "q4_k_m", "--max-memory", "2MB", "--imatrix")
    (here / "o").mkdir()
    stopped((*command, "0.gguf"), here / "o" / "m.gguf")
    before = tree(here / "o")
    said = refused(qconvert(*command, "1.gguf", "-o", here / "o" / "m.gguf"), "m.gguf.partial", before, here)
    assert said.startswith("statistics numbers was ")


def test_a_copy_of_the_source_is_the_source(model: Path, here: Path) -> None:
    command, name = KINDS["folder"]
    stopped(command, here / name)
    shutil.copytree(model, here / "elsewhere" / "m")
    shutil.rmtree(model)
    ran = qconvert("quantize", here / "elsewhere" / "m", *command[2:], "-o", here / name)
    assert ran.code == 0 and "resuming out.partial" in ran.err, ran.err


def test_samples_tell_files_apart_by_what_they_hold(tmp_path: Path) -> None:
    path = tmp_path / "f"
    for size in (0, 1, 4096, 4097, 300_000):
        raw = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
        path.write_bytes(raw)
        one = sample_hash(path, size)
        os.utime(path, (0, 0))
        assert sample_hash(path, size) == one
        for at in {0, size - 1} if size else set():
            path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
            assert sample_hash(path, size) != one


def test_a_partial_output_without_its_journal_or_of_another_size_is_begun_anew(
    model: Path, here: Path
) -> None:
    for kind in ("folder", "gguf"):
        command, name = KINDS[kind]
        out = here / name
        whole = made(*command, "-o", here / f"whole-{name}")
        partial = here / "out.partial" / "model.safetensors" if kind == "folder" else here / "m.gguf.partial"
        for damage in ("short", "journal"):
            stopped(command, out)
            if damage == "short":
                os.truncate(partial, 1000)
            else:
                path = (
                    partial.parent / ".qconvert-journal"
                    if kind == "folder"
                    else here / f"{name}.partial-journal"
                )
                path.write_bytes(b"1" + path.read_bytes())
            ran = qconvert(*command, "-o", out)
            assert ran.code == 0 and "resuming" not in ran.err
            got, want = (tree(each) if kind == "folder" else each.read_bytes() for each in (out, whole))
            if kind == "folder":
                got, want = got["model.safetensors"], want["model.safetensors"]
            assert got == want
            shutil.rmtree(out) if kind == "folder" else out.unlink()


# What ends a run


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_disk_that_is_full_ends_the_run_and_the_next_goes_on(
    kind: str, model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, name = KINDS[kind]
    real, calls = planned_files.write_exactly, iter(range(1000))

    def full(fd: int, buffer: memoryview, offset: int, name: str) -> None:
        if next(calls) == 20:
            try:
                raise OSError(28, "No space left on device")
            except OSError as error:
                raise QConvertError(f"{name}: cannot be written: {error.strerror}", "free some") from error
        real(fd, buffer, offset, name)

    with monkeypatch.context() as patch:
        patch.setattr(planned_files, "write_exactly", full)
        ran = qconvert(*command, "-j", 1, "-o", here / name)
    assert ran.code == 1 and "No space left on device" in ran.err
    assert "free some; then run the same command to continue at " in ran.err and not (here / name).exists()
    ran = qconvert(*command, "-o", here / name)
    assert ran.code == 0 and "resuming" in ran.err


def test_a_flush_that_fails_ends_the_run_with_what_was_in_the_journal(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, name = KINDS["folder"]
    real, calls = planned_files.sync_data, iter(range(1000))
    write = planned_files.FileSink.write

    def slow(*args: Any) -> None:
        time.sleep(0.02)
        write(*args)

    def failing(fd: int, name: str) -> None:
        if next(calls) >= 2:
            try:
                raise OSError(5, "Input/output error")
            except OSError as error:
                raise QConvertError(f"{name}: cannot be written to disk", "check the disk") from error
        real(fd, name)

    with monkeypatch.context() as patch:
        patch.setattr(planned_files, "sync_data", failing)
        patch.setattr(planned_files.FileSink, "write", slow)
        ran = qconvert(*command, "-j", 1, "-o", here / name)
    assert ran.code == 1 and "cannot be written to disk" in ran.err
    kept = journal_of(here / name)
    made(*command, "-o", here / name)
    assert kept is not None and kept.records and next(calls) == 3


def test_what_the_source_is_refused_for_leaves_nothing(
    model: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qconvert.convert.identity.SAMPLES", 16)
    command, name = KINDS["folder"]
    stopped(command, here / name)
    raw = bytearray((model / "model.safetensors").read_bytes())
    at = (len(raw) - 4096) * 14 // 15 // 2 * 2 + 5000  # between two samples, and behind what was read
    raw[at : at + 2] = b"\xc0\x7f"  # a NaN of bfloat16
    (model / "model.safetensors").write_bytes(raw)
    ran = qconvert(*command, "-o", here / name)
    assert ran.code == 1 and "NaN" in ran.err
    assert [path.name for path in here.iterdir()] == ["m"]


SCRIPT = """
import sys, time, qconvert.convert.runner as runner, qconvert.formats.io.journal as journal
from qconvert.cli import signals
from qconvert.convert import batches
journal.GROUP_BYTES, batches.SMALL, signals.SECONDS_TO_END = 1, 0.0, {patience}
real, count = runner._make, iter(range(1000))
def slow(*args):
    number = next(count)
    if number == 15:
        print("working", flush=True)
    if number >= 15:
        time.sleep({seconds})
    return real(*args)
runner._make = slow
from qconvert.cli import main
main()
"""


def started(seconds: float, *args: object, patience: float = signals.SECONDS_TO_END) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", SCRIPT.format(seconds=seconds, patience=patience), *map(str, args)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    assert process.stdout is not None and process.stdout.readline() == "working\n"
    return process


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("seconds", [0.1, 60])
def test_a_signal_stops_within_seconds_however_long_a_block_takes(
    kind: signal.Signals, code: int, seconds: float, model: Path, here: Path
) -> None:
    command, name = KINDS["folder"]
    whole = made(*command, "-o", here / "whole" / name)
    as_json = ("--json",) if kind == signal.SIGTERM else ()
    patience = 1.0 if seconds > signals.SECONDS_TO_END else signals.SECONDS_TO_END
    with started(seconds, *command, "-j", 1, "-o", here / name, *as_json, patience=patience) as process:
        before = time.monotonic()
        process.send_signal(kind)
        out, err = process.communicate(timeout=30)
        took = time.monotonic() - before
    assert process.returncode == code, err
    told = json.loads(out)["error"] if as_json else {"fact": err.splitlines()[-1]}
    assert not as_json or (told["kind"], told["exit_code"], told["retryable"]) == ("interrupted", code, True)
    said = told["fact"]
    assert said.startswith("stopped at ") and said.endswith(" %; run the same command to continue")
    assert took < patience + 4  # on a machine that is busy with other things
    assert signals.SECONDS_TO_END < 5
    ran = qconvert(*command, "-o", here / name)
    assert ran.code == 0 and f"resuming out.partial: {said.split()[2]} % was done" in ran.err
    assert tree(here / name) == tree(whole)


def test_a_second_signal_ends_the_command_at_once(model: Path, here: Path) -> None:
    command, name = KINDS["gguf"]
    with started(60, *command, "-j", 1, "-o", here / name) as process:
        before = time.monotonic()
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        assert time.monotonic() - before < signals.SECONDS_TO_END
    assert process.returncode == 130 and not (here / name).exists()
    made(*command, "-o", here / name)


def test_before_a_first_block_is_done_nothing_is_left(model: Path, here: Path) -> None:
    job = library.prepare(
        library.open_model("m"), library.Request("fuse", library.Recipe(fuse=("qkv",))), library.RunOptions()
    )

    def stop(run: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.execute(job, here / "out", opened=stop)
    assert [path.name for path in here.iterdir()] == ["m"]


# Numerics


def test_a_change_of_output_bytes_goes_with_a_new_number(here: Path) -> None:
    """A run that was begun before such a change must not be gone on with after it."""
    from hashlib import sha256

    folder = made("quantize", "embedded", "--bits", 4, "-o", here / "out")
    file = made("to-gguf", "embedded", "--type", "q4_k_m", "-o", here / "m.gguf")
    hashes = [sha256(path.read_bytes()).hexdigest()[:16] for path in (folder / "model.safetensors", file)]
    assert {version.NUMERICS: hashes} == {1: HASHES}, "raise NUMERICS in core/version.py, and update this"


HASHES = ["d7cfa8aaec6f58ac", "2ee2a291e57ec623"]
