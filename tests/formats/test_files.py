"""Descriptors, full disks and strange files, met before they hurt."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from qconvert.errors import CorruptCheckpoint, QConvertError, shown
from qconvert.formats.io import local_file
from qconvert.formats.io.local_file import (
    amount,
    create,
    octets,
    open_regular,
    read_all_exactly,
    read_exactly,
    require_free_disk,
    write_exactly,
)


def test_a_small_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "report.json"
    local_file.require_writable(path)
    local_file.write_whole(path, b"first")
    local_file.write_whole(path, b"second")
    assert path.read_bytes() == b"second" and list(path.parent.iterdir()) == [path]

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(QConvertError, match=r"report\.json: cannot be written at byte 0: No space left"):
        local_file.write_whole(path, b"third")
    assert path.read_bytes() == b"second" and list(path.parent.iterdir()) == [path]
    for impossible in (path / "below.json", path.parent):
        with pytest.raises(QConvertError, match=r"cannot be created: (Not|Is) a directory"):
            local_file.require_writable(impossible)


def test_a_full_disk_is_not_blamed_on_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(source))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(QConvertError, match=r"^\S+/target: cannot be written: No space left on device"):
        local_file.copy_whole(tmp_path / "source", tmp_path / "target")


def test_text_from_files_is_shown_on_one_printable_line() -> None:
    assert shown("model.embed_tokens.weight") == "model.embed_tokens.weight"
    assert shown("Größe 漢") == "Größe 漢"
    assert shown("a\u202eb\n") == r"'a\u202eb\n'"
    assert shown("x" * 100_000) == "x" * 120 + "... (100000 characters)"
    assert shown([1, "\u202e"]) == r"[1, '\u202e']"
    assert shown([7] * 1_000_000) == "[7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, ...]"


def test_amounts_read_as_people_write_them() -> None:
    assert [amount(n) for n in (0, 9_999_999, 3_087_467_144)] == ["0 bytes", "9,999,999 bytes", "3.09 GB"]


def test_only_regular_files_are_opened_and_nothing_blocks(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to("file")
    os.close(open_regular(tmp_path / "link"))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name, fact in {
        "folder": "folder: is a folder, not a file",
        "pipe": "pipe: is a pipe or device, not a file",
        "loop": f"loop: cannot be opened: {os.strerror(errno.ELOOP)}",
        "none": f"none: cannot be opened: {os.strerror(errno.ENOENT)}",
    }.items():
        with pytest.raises(CorruptCheckpoint) as refused:
            open_regular(tmp_path / name)
        assert refused.value.fact == fact


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    written = np.arange(300, dtype="<u2").reshape(3, 100)
    fd = create(tmp_path / "file", 650)
    write_exactly(fd, octets(written), 50, "file")
    read = np.empty_like(written)
    read_exactly(fd, octets(read), 50, "file")
    np.testing.assert_array_equal(read, written)
    assert (tmp_path / "file").stat().st_size == 650
    with pytest.raises(CorruptCheckpoint, match="file: ends at byte 650, 50 bytes short"):
        read_exactly(fd, octets(read), 100, "file")
    os.close(fd)


def test_short_reads_and_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pread, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: pread(fd, [buffers[0][:7]], at))
    monkeypatch.setattr(os, "pwrite", lambda fd, buffer, at: pwrite(fd, buffer[:5], at))
    fd = create(tmp_path / "file", 100)
    write_exactly(fd, memoryview(bytes(range(100))), 0, "file")
    read = bytearray(100)
    read_exactly(fd, memoryview(read), 0, "file")
    os.close(fd)
    assert read == bytes(range(100))


@pytest.mark.parametrize("most", [7, 30, 1000])
def test_parts_that_lie_side_by_side_are_read_in_one_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """However little a call gives; what is not there is an error that says where."""
    calls, pread = [], os.preadv

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        calls.append(at)
        left, some = most, []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        return pread(fd, some, at)

    fd = create(tmp_path / "file", 100)
    write_exactly(fd, memoryview(bytes(range(100))), 0, "file")
    monkeypatch.setattr(os, "preadv", preadv)
    places = [(0, 10), (10, 0), (10, 30), (50, 20), (70, 30)]
    buffers = [bytearray(nbytes) for _, nbytes in places]
    parts = [(offset, memoryview(buffer)) for (offset, _), buffer in zip(places, buffers, strict=True)]
    read_all_exactly(fd, parts, "file")
    assert buffers == [bytes(range(offset, offset + nbytes)) for offset, nbytes in places]
    assert (calls == [0, 50]) == (most == 1000)
    with pytest.raises(CorruptCheckpoint, match="file: ends at byte 100, 5 bytes short"):
        read_all_exactly(fd, [(90, memoryview(bytearray(8))), (98, memoryview(bytearray(7)))], "file")
    os.close(fd)


def test_the_bytes_of_an_empty_array_are_none() -> None:
    assert len(octets(np.empty((0, 4), "<f4"))) == 0
    with pytest.raises(ValueError, match="strides"):
        octets(np.zeros((4, 4))[:, ::2])


def test_a_full_disk_shows_before_the_work_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(QConvertError, match=r"out: needs 1000000000\.00 GB, \d+\.\d\d GB free"):
        require_free_disk(tmp_path / "not" / "yet" / "out", 10**18)
    require_free_disk(tmp_path / "out", 1)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(
        QConvertError, match=r"w: needs 100 bytes, .* free: No space left on device"
    ) as refused:
        create(tmp_path / "w", 100)
    assert refused.value.hint == "free some space, or write to another disk"
    assert not (tmp_path / "w").exists()


@pytest.mark.parametrize("refused", [errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_disk_that_reserves_nothing_is_written_all_the_same(
    tmp_path: Path, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: int) -> None:
        raise OSError(refused, os.strerror(refused))

    monkeypatch.setattr(os, "posix_fallocate", cannot, raising=False)
    os.close(create(tmp_path / "w", 100))
    assert (tmp_path / "w").stat().st_size == 100


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_write_that_fails_is_told_with_its_place() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    with pytest.raises(QConvertError, match="w: cannot be written at byte 8: No space left on device"):
        write_exactly(fd, memoryview(b"x" * 10), 8, "w")
    os.close(fd)


def test_a_name_that_two_processes_give_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is stopped between both steps, while another takes the second; the file keeps its name."""
    link = os.link

    def overtaken(partial: Path, final: Path) -> None:
        link(partial, final)
        partial.unlink()

    monkeypatch.setattr(os, "link", overtaken)
    (tmp_path / "partial").write_bytes(b"whole")
    local_file.name_new(tmp_path / "partial", tmp_path / "final")
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
