"""Windows over what blocks read: each byte is fetched once, memory is bounded, and nobody waits for ever."""

from __future__ import annotations

import errno
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qconvert.checkpoint import windows as module
from qconvert.checkpoint.network import Aborted, Network
from qconvert.checkpoint.remote_bytes import RemoteBytes
from qconvert.checkpoint.windows import Range, Windows, cut_windows
from qconvert.errors import SourceUnavailable

FILES = [random.Random(number).randbytes(4000) for number in range(3)]


class Bytes:
    """A file that counts what is fetched of it, and knows how much is held at once."""

    def __init__(self, number: int, fail_at: int | None = None) -> None:
        self.number, self.fail_at = number, fail_at
        self.windows: Windows | None = None
        self.fetched: list[tuple[int, int]] = []

    def fetch(self, buffer: memoryview, offset: int) -> None:
        if self.fail_at is not None and offset <= self.fail_at < offset + len(buffer):
            raise SourceUnavailable("host: file: gone", "hint")
        self.fetched.append((offset, len(buffer)))
        buffer[:] = FILES[self.number][offset : offset + len(buffer)]


Needs = list[list[Range]]


def carry_out(needs: Needs, budget: int, jobs: int, files: list[Bytes], connections: int = 3) -> None:
    """Read what every block reads, in as many threads, and hold it against the files."""
    sources = cast("list[RemoteBytes | None]", files)
    with Windows(sources, needs, budget, Network(connections)) as held, ThreadPoolExecutor(jobs) as pool:

        def work(block: int) -> None:
            with held.block(block):
                for part in needs[block]:
                    buffer = bytearray(part.end - part.begin)
                    held.read_into(cast(RemoteBytes, files[part.file]), memoryview(buffer), part.begin)
                    assert buffer == FILES[part.file][part.begin : part.end]

        try:
            for done in [pool.submit(work, block) for block in range(len(needs))]:
                done.result(timeout=5)
        except BaseException:
            held.abort()
            raise
        assert held._held == 0, "everything is freed"


def rows(file: int, first: int, stop: int, step: int) -> Needs:
    return [[Range(file, at, min(at + step, stop))] for at in range(first, stop, step)]


def needed(needs: Needs) -> int:
    """The bytes that any block reads, each once."""
    return len({(part.file, at) for ranges in needs for part in ranges for at in range(part.begin, part.end)})


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALLEST_WINDOW", 64)
    monkeypatch.setattr(module, "LARGEST_WINDOW", 512)


def test_neighbours_come_together_and_distant_ranges_apart() -> None:
    dense = rows(0, 100, 1000, 50)
    windows = cut_windows(dense, 300)
    assert [(w.begin, w.end) for w in windows] == [(100, 400), (400, 700), (700, 1000)]
    assert windows[0].users == {0, 1, 2, 3, 4, 5}
    apart = [[Range(0, 0, 100)], [Range(0, 2000, 2100)], [Range(0, 100, 200)]]
    assert [(w.begin, w.end) for w in cut_windows(apart, 300)] == [(0, 200), (2000, 2100)]


def test_ranges_that_are_read_much_later_are_not_held_until_then() -> None:
    later = [[Range(0, 0, 100)], *rows(1, 0, 4000, 100), [Range(0, 100, 200)]]
    assert [(w.begin, w.end) for w in cut_windows(later, 300) if w.file == 0] == [(0, 100), (100, 200)]


def test_a_gap_is_fetched_along_only_where_it_is_small() -> None:
    windows = cut_windows([[Range(0, 0, 1280)], [Range(0, 1290, 1400)], [Range(0, 1410, 1500)]], 4000)
    assert [(w.begin, w.end) for w in windows] == [(0, 1400), (1410, 1500)] or sum(
        w.size for w in windows
    ) <= 1.02 * needed([[Range(0, 0, 1280)], [Range(0, 1290, 1400)], [Range(0, 1410, 1500)]])


@pytest.mark.parametrize("jobs", [1, 4])
def test_each_byte_is_fetched_once(jobs: int) -> None:
    scales = Range(0, 3000, 3040)  # of the whole tensor: read by every block
    needs = [[*ranges, scales] for ranges in rows(0, 0, 3000, 100)] + rows(1, 0, 4000, 40)
    files = [Bytes(0), Bytes(1), Bytes(2)]
    carry_out(needs, 2000, jobs, files)
    assert sum(size for file in files for _, size in file.fetched) <= 1.02 * needed(needs)


@settings(max_examples=60, deadline=None)
@given(
    needs=st.lists(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(0, 3900), st.integers(1, 400)), min_size=0, max_size=4
        ),
        min_size=1,
        max_size=25,
    ),
    budget=st.sampled_from([1, 100, 700, 10_000]),
    jobs=st.integers(1, 5),
)
def test_any_needs_are_served_in_any_budget(
    needs: list[list[tuple[int, int, int]]], budget: int, jobs: int
) -> None:
    listed = [[Range(f, at, min(4000, at + size)) for f, at, size in ranges] for ranges in needs]
    carry_out(listed, budget, jobs, [Bytes(0), Bytes(1), Bytes(2)])


def test_memory_is_bounded() -> None:
    needs, most, lock = rows(0, 0, 4000, 50), [0], threading.Lock()
    files = [Bytes(0)]
    sources = cast("list[RemoteBytes | None]", files)
    with Windows(sources, needs, 600, Network(8)) as held:
        for block in range(len(needs)):
            with held.block(block), lock:
                most[0] = max(most[0], held._held)
                part = needs[block][0]
                held.read_into(sources[0], memoryview(bytearray(50)), part.begin)  # type: ignore[arg-type]
    assert 0 < most[0] <= 600


def test_a_failure_reaches_whoever_waits() -> None:
    with pytest.raises(SourceUnavailable, match="gone"):
        carry_out(rows(0, 0, 4000, 100), 1000, 3, [Bytes(0, fail_at=2000)])


def test_memory_that_the_system_does_not_give_reaches_whoever_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(nbytes: int) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(module, "in_large_pages", refused)
    with pytest.raises(OSError, match="Cannot allocate memory"):
        carry_out(rows(0, 0, 2000, 100), 1000, 2, [Bytes(0)])


def test_an_abort_wakes_whoever_waits() -> None:
    blocked = threading.Event()

    class Silent(Bytes):
        def fetch(self, buffer: memoryview, offset: int) -> None:
            blocked.wait(10)

    files = cast("list[RemoteBytes | None]", [Silent(0)])
    ended: list[bool] = []
    with Windows(files, rows(0, 0, 400, 100), 10_000, Network(2)) as held:

        def work() -> None:
            with held.block(0), pytest.raises(Aborted):
                held.read_into(cast(RemoteBytes, files[0]), memoryview(bytearray(10)), 0)
            ended.append(True)

        thread = threading.Thread(target=work)
        thread.start()
        held.abort()
        thread.join(2)
        blocked.set()
    assert ended
