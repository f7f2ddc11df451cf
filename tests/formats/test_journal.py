"""The journal alone: what a reader believes of a file that was torn, damaged, or gone on with."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from qconvert.errors import QConvertError
from qconvert.formats.io import journal
from qconvert.formats.io.journal import GroupCommit, JournalFile, committing, discard, load, packed, parse

JOB = {"source": {"bytes": 7}, "name": "é"}
BLOCK = ["b", "w", 0, None, 0.1, float("inf")]


def written(path: Path, groups: list[list[list[Any]]]) -> bytes:
    file = JournalFile.create(path, JOB, {"grid": 3})
    for group in groups:
        file.append(group)
    file.close()
    return path.read_bytes()


GROUPS: list[list[list[Any]]] = [[["b", 0], ["n", "x", 0.1 + 0.2]], [BLOCK], [["b", i] for i in range(5)]]


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    raw = written(tmp_path / "j", GROUPS)
    found = load(tmp_path / "j")
    assert found is not None and found == parse(raw)
    assert (found.job, found.settings, found.end) == (JOB, {"grid": 3}, len(raw))
    assert list(found.records) == [record for group in GROUPS for record in group]
    assert list(tmp_path.iterdir()) == [tmp_path / "j"]


def test_of_a_torn_journal_whole_groups_count(tmp_path: Path) -> None:
    """However many bytes of it there are: those groups that end within them, and nothing else."""
    raw = written(tmp_path / "j", GROUPS)
    ends = [i + 1 for i, byte in enumerate(raw) if byte == ord("\n")]
    closed = [end for end in ends if b' ["c",' in raw[:end].splitlines()[-1]]
    for size in range(len(raw) + 1):
        found = parse(raw[:size])
        if size < ends[0]:
            assert found is None
            continue
        whole = sum(end <= size for end in closed)
        assert found is not None
        assert list(found.records) == [record for group in GROUPS[:whole] for record in group]
        assert found.end == ([ends[0], *closed][whole])


def test_behind_a_damaged_byte_nothing_counts(tmp_path: Path) -> None:
    raw = written(tmp_path / "j", GROUPS)
    first = raw.index(b"\n") + 1
    for at in range(len(raw)):
        for flip in (1, 0x80):
            found = parse(raw[:at] + bytes([raw[at] ^ flip]) + raw[at + 1 :])
            if at < first:
                # Without its end, the first line has the second in it.
                assert found is None, at
            else:
                assert found is not None and found.end <= at
                assert raw[: found.end].startswith(raw[:first])


@pytest.mark.parametrize(
    "raw",
    [b"", b"\n", b"\n\n", b"x", b"00000000 []\n", b"00000000 null\n", packed("s", ["h", {}, {}, "t"]),
     packed("s", ["b", {}, {}, "s"]), packed("s", ["h", "s"]), b"\xff\xfe\n", b"[" * 100_000 + b"\n"],
)  # fmt: skip
def test_what_is_no_journal_is_none(raw: bytes) -> None:
    assert parse(raw) is None


def test_lines_of_an_earlier_journal_do_not_count(tmp_path: Path) -> None:
    """They may lie on the disk behind the end of a new one, which has another salt."""
    old = written(tmp_path / "old", GROUPS)
    new = written(tmp_path / "new", [])
    found = parse(new + old[old.index(b"\n") + 1 :])
    assert found is not None and found.records == () and found.end == len(new)


def test_a_group_says_how_many_records_it_has(tmp_path: Path) -> None:
    raw = written(tmp_path / "j", [])
    salt = parse(raw).salt  # type: ignore[union-attr]
    for group in ([["c", 1]], [["b", 1], ["c", 2]], [["b", 1], ["b", 2], ["c", 1]], [["b", 1], ["c", 1, 0]]):
        found = parse(raw + b"".join(packed(salt, record) for record in group))
        assert found is not None and found.records == ()


def test_a_link_is_no_journal_and_a_missing_one_none(tmp_path: Path) -> None:
    written(tmp_path / "j", GROUPS)
    (tmp_path / "link").symlink_to("j")
    assert load(tmp_path / "link") is None and load(tmp_path / "none") is None
    discard(tmp_path / "link")
    discard(tmp_path / "none")
    assert [path.name for path in tmp_path.iterdir()] == ["j"]
    (tmp_path / "folder").mkdir()
    with pytest.raises(QConvertError, match="cannot be read"):
        load(tmp_path / "folder")


def test_numbers_of_numpy_are_written_as_what_they_are(tmp_path: Path) -> None:
    written(tmp_path / "j", [[["b", np.float32(0.1), np.float64(0.1), np.int64(3)]]])
    found = load(tmp_path / "j")
    assert found is not None and found.records == (["b", float(np.float32(0.1)), 0.1, 3],)


class Journals(RuleBasedStateMachine):
    """Groups, kills in the middle of one, bits that flip behind the last good group, and reopening."""

    @initialize()
    def begin(self) -> None:
        import tempfile

        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "j"
        self.file = JournalFile.create(self.path, JOB, {})
        self.model: list[Any] = []
        self.count = 0
        self.dead = False

    def fresh(self, count: int) -> list[list[Any]]:
        self.count += count
        return [["b", number] for number in range(self.count - count, self.count)]

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        self.reopen()
        group = self.fresh(count)
        self.file.append(group)
        self.model += group

    @rule(count=st.integers(1, 4), cut=st.floats(0, 1, exclude_max=True))
    def tear(self, count: int, cut: float) -> None:
        self.reopen()
        size = self.path.stat().st_size
        self.file.append(self.fresh(count))
        os.truncate(self.path, size + int(cut * (self.path.stat().st_size - size)))
        self.dead = True

    @rule(count=st.integers(1, 4), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
    def flip(self, count: int, where: float, bit: int) -> None:
        self.reopen()
        size = self.path.stat().st_size
        self.file.append(self.fresh(count))
        raw = bytearray(self.path.read_bytes())
        raw[size + int(where * (len(raw) - size))] ^= 1 << bit
        self.path.write_bytes(raw)
        self.dead = True

    @rule(rest=st.binary(max_size=40))
    def litter(self, rest: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(rest)
        self.dead = True

    def reopen(self) -> None:
        if self.dead:
            self.file.close()
            found = load(self.path)
            assert found is not None
            self.file = JournalFile.reopen(self.path, found)
            self.dead = False

    @invariant()
    def the_reader_believes_what_was_committed(self) -> None:
        found = load(self.path)
        assert found is not None and list(found.records) == self.model

    def teardown(self) -> None:
        self.file.close()
        self.folder.cleanup()


TestJournals = Journals.TestCase


# Group commits


def test_data_is_on_the_disk_before_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    file = JournalFile.create(tmp_path / "j", JOB, {})
    append = JournalFile.append

    def appended(self: JournalFile, records: Any) -> None:
        append(self, records)
        order.append(f"group of {len(records)}")

    monkeypatch.setattr(JournalFile, "append", appended)
    monkeypatch.setattr(journal, "GROUP_SECONDS", 60.0)
    monkeypatch.setattr(journal, "GROUP_BYTES", 100)
    with committing(file, lambda: order.append("data")) as group:
        group.add(["b", 1], 60)
        assert group.committed == 0
        group.add(["b", 2], 60)
        deadline = time.monotonic() + 10
        while group.committed < 120 and time.monotonic() < deadline:
            time.sleep(0.001)
        group.add(["b", 3], 5)
    assert order == ["data", "group of 2", "data", "group of 1"] and group.committed == 125
    file.close()
    assert [record[1] for record in load(tmp_path / "j").records] == [1, 2, 3]  # type: ignore[union-attr]


def test_a_group_is_closed_after_some_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "GROUP_SECONDS", 0.01)
    file = JournalFile.create(tmp_path / "j", JOB, {})
    with committing(file, lambda: None) as group:
        group.add(["b", 1], 1)
        deadline = time.monotonic() + 10
        while not load(tmp_path / "j").records:  # type: ignore[union-attr]
            assert time.monotonic() < deadline
    file.close()


def test_an_error_of_the_disk_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second flush would succeed: the system has forgotten what it could not write."""
    monkeypatch.setattr(journal, "GROUP_BYTES", 1)
    tries: list[int] = []

    def broken() -> None:
        tries.append(1)
        raise QConvertError("w: cannot be written to disk: Input/output error", "check the disk")

    file = JournalFile.create(tmp_path / "j", JOB, {})
    group = GroupCommit(file, broken)
    with pytest.raises(QConvertError, match="Input/output error"):
        for number in range(1000):
            group.add(["b", number], 1)
            time.sleep(0.01)
    for _ in range(2):
        with pytest.raises(QConvertError, match="Input/output error"):
            group.close()
    file.close()
    assert len(tries) == 1 and load(tmp_path / "j").records == ()  # type: ignore[union-attr]


def test_the_error_of_the_work_is_told_and_no_thread_is_left(tmp_path: Path) -> None:
    before = threading.active_count()
    file = JournalFile.create(tmp_path / "j", JOB, {})
    with pytest.raises(ZeroDivisionError), committing(file, lambda: None) as group:
        group.add(["b", 1], 1)
        raise ZeroDivisionError
    file.close()
    assert threading.active_count() == before
    assert load(tmp_path / "j").records == (["b", 1],)  # type: ignore[union-attr]
