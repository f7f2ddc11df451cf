"""Fetches what blocks of a plan read before they read it, every byte once, in bounded memory.

What each block reads is known, so neighbouring ranges are joined to windows of a size that servers like, and
a window is held until the last block that needs it is done: a count of users, no cache that could guess
wrong. Windows come in the order of the blocks, as many at once as there are connections, while they fit the
budget. The invariant: a block waits only for windows that are under way; the first block that is not done
reads by itself what does not fit, so that every budget gets to the end.
"""

from __future__ import annotations

import mmap
import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from qconvert.checkpoint.network import Aborted, Network
from qconvert.checkpoint.remote_bytes import RemoteBytes
from qconvert.core.large_pages import in_large_pages

LARGEST_WINDOW = 32 << 20
_SMALLEST_WINDOW = 256 << 10
# Windows that the budget holds at least; a block of fused tensors reads several at once.
_WINDOWS_HELD = 8
# Bytes between two ranges that are fetched along, as a part of what is needed: under 1 %.
_GAP_SHARE = 128
_PENDING, _COMING, _HERE, _GONE = range(4)


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes [begin, end) of a file, by its number, that a block reads."""

    file: int
    begin: int
    end: int


@dataclass(slots=True)
class Window:
    """Bytes [begin, end) of a file; `users` are the numbers of the blocks that still need them."""

    file: int
    begin: int
    end: int
    users: set[int] = field(default_factory=set)
    state: int = _PENDING
    bytes_: mmap.mmap | None = None

    @property
    def size(self) -> int:
        return self.end - self.begin


def window_bytes(budget: int) -> int:
    """How large windows are in a budget of bytes."""
    return max(_SMALLEST_WINDOW, min(LARGEST_WINDOW, budget // _WINDOWS_HELD))


def cut_windows(needs: Sequence[Iterable[Range]], largest: int) -> list[Window]:
    """The windows of what each block reads, in the order in which they are needed first.

    Ranges are joined that lie side by side and are read at about the same time: as long as a window spans
    less than twice its size of the bytes that are read one after another.
    """
    listed = [tuple(ranges) for ranges in needs]
    read_before = list(accumulate((sum(r.end - r.begin for r in ranges) for ranges in listed), initial=0))
    ordered = sorted(
        ((r.file, r.begin, r.end, block) for block, ranges in enumerate(listed) for r in ranges),
    )
    windows: list[Window] = []
    for file, first, end, block in ordered:
        begin = first
        while begin < end:
            last = windows[-1] if windows and windows[-1].file == file else None
            if last is not None and begin < last.end:  # a range that an earlier block reads too
                _use(windows, file, begin, end, block)
                begin = last.end
                continue
            stop = min(end, begin + largest)
            if last is not None and _joins(last, begin, largest, read_before, block):
                last.end = min(end, last.begin + largest)
                last.users.add(block)
                begin = last.end
                continue
            windows.append(Window(file, begin, stop, {block}))
            begin = stop
    return sorted(windows, key=lambda window: (min(window.users), window.file, window.begin))


def _use(windows: list[Window], file: int, begin: int, end: int, block: int) -> None:
    """Counts a block as a user of the windows that hold its bytes already."""
    for window in reversed(windows):
        if window.file != file or window.end <= begin:
            return
        if window.begin < end:
            window.users.add(block)


def _joins(last: Window, begin: int, largest: int, read_before: list[int], block: int) -> bool:
    """Whether a window may grow to hold a range, or the start of it, that begins after it."""
    apart = abs(read_before[block] - read_before[min(last.users)])
    return (
        begin - last.end <= last.size // _GAP_SHARE and begin < last.begin + largest and apart <= 2 * largest
    )


class Windows:
    """Holds the bytes of the blocks that run, and of those that are next; `files` are told apart by number.

    While it is open, the files read from it.
    """

    def __init__(
        self,
        files: Sequence[RemoteBytes | None],
        needs: Sequence[Iterable[Range]],
        budget: int,
        network: Network,
    ) -> None:
        self._files, self._budget, self._network = files, budget, network
        self._numbers = {id(file): number for number, file in enumerate(files) if file is not None}
        self._order = cut_windows(needs, window_bytes(budget))
        self._by_file: dict[int, list[Window]] = defaultdict(list)
        for window in sorted(self._order, key=lambda window: window.begin):
            self._by_file[window.file].append(window)
        self._begins = {file: [w.begin for w in found] for file, found in self._by_file.items()}
        self._of_block: dict[int, list[Window]] = defaultdict(list)
        for window in self._order:
            for user in window.users:
                self._of_block[user].append(window)
        self._undone = [True] * len(needs)
        self._first_undone = self._next = self._held = 0
        lock = threading.Lock()
        self._changed, self._room = threading.Condition(lock), threading.Condition(lock)
        self._error: BaseException | None = None
        self._ended = False
        self._mine = threading.local()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Windows:
        self._network.begin()
        for file in self._files:
            if file is not None:
                file.windows = self
        for _ in range(min(self._network.connections, len(self._order))):
            thread = threading.Thread(target=self._fetch_all, daemon=True)
            self._threads.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended = True
            self._room.notify_all()
        for thread in self._threads:
            thread.join(timeout=2)
        for file in self._files:
            if file is not None:
                file.windows = None
        with self._changed:
            for window in self._order:
                self._forget(window)

    def abort(self) -> None:
        """End all transfers; threads that wait for one get an error."""
        with self._changed:
            self._ended = True
            self._error = self._error or Aborted()
            self._changed.notify_all()
            self._room.notify_all()
        self._network.abort()

    @contextmanager
    def block(self, number: int) -> Iterator[None]:
        """Around the work on a block, in its thread: afterwards nothing is held for it."""
        self._mine.block = number
        try:
            yield
        finally:
            self._mine.block = -1
            with self._changed:
                self._undone[number] = False
                while self._first_undone < len(self._undone) and not self._undone[self._first_undone]:
                    self._first_undone += 1
                for window in self._of_block.pop(number, ()):
                    window.users.discard(number)
                    if not window.users and window.state != _COMING:
                        self._forget(window)
                self._changed.notify_all()

    def read_into(self, file: RemoteBytes, buffer: memoryview, offset: int) -> None:
        """Fill a buffer: from windows, waiting for them, and by requests of its own where there are none."""
        number = self._numbers[id(file)]
        windows, begins = self._by_file.get(number, []), self._begins.get(number, [])
        done = 0
        while done < len(buffer):
            at = offset + done
            place = bisect_right(begins, at) - 1
            window = windows[place] if place >= 0 and windows[place].end > at else None
            if window is not None:
                stop = min(len(buffer), window.end - offset)
                if self._copied(window, buffer[done:stop], at):
                    done = stop
                    continue
            else:
                stop = (
                    min(len(buffer), begins[place + 1] - offset) if place + 1 < len(begins) else len(buffer)
                )
            file.fetch(buffer[done:stop], at)
            done = stop

    def _copied(self, window: Window, part: memoryview, offset: int) -> bool:
        """Copies bytes of a window once it is here; False where it will not come for this block."""
        block: int = getattr(self._mine, "block", -1)
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if block not in window.users or window.state == _GONE:
                    return False
                if window.state == _HERE:
                    break
                if window.state == _PENDING and self._must_not_wait(block):
                    window.users.discard(block)
                    self._room.notify_all()  # the window after it may fit
                    return False
                self._changed.wait()
            found = window.bytes_
        assert found is not None
        begin = offset - window.begin
        with memoryview(found) as held:  # it stays as long as this block, one of its users, is not done
            part[:] = held[begin : begin + len(part)]
        return True

    def _must_not_wait(self, block: int) -> bool:
        """Whether nothing but this block can free the memory that the next window needs."""
        return block == self._first_undone and not self._fits()

    def _fits(self) -> bool:
        while self._next < len(self._order) and not self._order[self._next].users:
            self._order[self._next].state = _GONE
            self._next += 1
        if self._next == len(self._order):
            return True
        return not self._held or self._held + self._order[self._next].size <= self._budget

    def _fetch_all(self) -> None:
        """What each fetching thread does: the next window that fits, until there are none."""
        while (window := self._admitted()) is not None:
            file = self._files[window.file]
            assert file is not None
            try:
                window.bytes_ = in_large_pages(window.size)
                with memoryview(window.bytes_) as buffer:
                    file.fetch(buffer, window.begin)
            except BaseException as error:
                with self._changed:
                    self._error = self._error or error
                    self._ended = True
                    self._changed.notify_all()
                    self._room.notify_all()
                return
            with self._changed:
                window.state = _HERE
                if not window.users:
                    self._forget(window)
                self._changed.notify_all()

    def _admitted(self) -> Window | None:
        """Waits for the budget, and takes the next window; None at the end."""
        with self._changed:
            while not self._ended:
                fits = self._fits()
                if self._next == len(self._order):
                    return None
                if fits:
                    window = self._order[self._next]
                    self._next += 1
                    self._held += window.size
                    window.state = _COMING
                    self._changed.notify_all()  # the first block may have to help itself now
                    return window
                self._room.wait()
        return None

    def _forget(self, window: Window) -> None:
        """Frees a window's memory, under the lock; there is room for another one then."""
        if window.state == _HERE:
            self._held -= window.size
            assert window.bytes_ is not None
            window.bytes_.close()
            window.bytes_ = None
        if window.state != _COMING:
            window.state = _GONE
            self._room.notify_all()
