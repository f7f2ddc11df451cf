"""Divides the tasks of one job among processes, on one machine or many, through a folder that they share.

A task is done once its receipt has its name. The process that does a task writes what it makes into a folder
of its own, brings it to the disk, and then names the receipt, which says where that is. The invariants: a
receipt gets its name once, by the first that finishes, and is never changed; the bytes that it records were
on the disk before; and two processes never write into one file. So a task that is done twice, by a process
that was assumed to be dead, is wasted and does no damage.

Claims only spare that waste: a process leaves the tasks alone that another one has claimed, unless that is
gone from this machine, or has not touched its claim for two minutes. Nothing else passes between processes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

from qconvert.core.dtypes import Json
from qconvert.errors import OtherJob, OutputExists, QConvertError
from qconvert.formats.io.journal import Record, first_difference, load, whole
from qconvert.formats.io.local_file import explained, name_new, sync, write_exactly

SUFFIX = ".partial-ranks"
# A claim is touched so often, and expires when it was not touched for so long.
TOUCH_SECONDS = 15.0
STALE_SECONDS = 120.0
WAIT_SECONDS = 0.2, 2.0  # between two looks at what others have done: at first, and at most

_JOB, _FINISHED = "job", "finished"
_RECEIPT, _CLAIM = ".receipt", ".claim"
_TELLS = f"told{_CLAIM}"
_OWN = re.compile(r"[0-9a-f]{16}")


def shared_folder(out: Path) -> Path:
    """Where processes that make `out` together keep what they have done of it."""
    return out.with_name(f"{out.name}{SUFFIX}")


def is_shared(out: Path) -> bool:
    """Whether such processes have begun, and not finished, the output `out`."""
    return (shared_folder(out) / _JOB).is_file()


def settings_of(out: Path) -> Json:
    """The settings of the process that began the unfinished output `out`; none where there is none."""
    found = load(shared_folder(out) / _JOB)
    return {} if found is None else found.settings


def discard_shared(out: Path, job: Json) -> bool:
    """Remove what processes have left of the output `out`; False where they left nothing of this job."""
    folder = shared_folder(out)
    found = load(folder / _JOB)
    if found is None or first_difference(found.job, job) is not None:
        return False
    _remove(folder)
    return True


class Published(Exception):
    """Another process has finished the output, and removed the folder."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What came of a task: records, and the folder in which its files lie."""

    records: Sequence[Record]
    folder: Path


class SharedFolder:
    """A shared folder, as one process sees it.

    `settings` are those of the process that began the job, `job` the hash of its facts; `own` is a folder
    that no other process writes into, `finished` one that all put whole files into; `receipts` are those
    seen so far, by task.
    """

    def __init__(self, path: Path, job: Json, settings: Json) -> None:
        """Begin the job in the folder, or join it.

        `job` are the facts that tell jobs apart, by name, as JSON has them. Raises OtherJob where the folder
        is another job's, OutputExists where it is none of ours.
        """
        if path.exists() and not (path / _JOB).exists() and not all(map(_is_ours, path.iterdir())):
            raise OutputExists(f"{path}: is in the way, and not a leftover of qconvert", "move or remove it")
        self._nonce = os.urandom(8).hex()
        self.path, self.own, self.finished = path, path / self._nonce, path / _FINISHED
        self.receipts: dict[str, Receipt] = {}
        self.job = sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self._mark = {"job": self.job}
        with explained(f"{path}: cannot be created"):
            self.own.mkdir(parents=True)
        try:
            self.settings = self._joined(job, settings)
        except BaseException:
            self.close()
            raise

    def _joined(self, job: Json, settings: Json) -> Json:
        path = self.path / _JOB
        if not path.exists():
            with suppress(FileExistsError):
                self._name(_JOB, whole(job, settings, ()))
        found = load(path)
        if found is None:
            raise QConvertError(f"{path}: is damaged", f"remove {self.path}, and start again")
        difference = first_difference(found.job, job)
        if difference is not None:
            raise OtherJob(
                f"{self.path}: is the unfinished output of another job, whose {difference}",
                "run the command that started it, to continue; or remove the folder, to discard it",
            )
        return found.settings

    def close(self) -> None:
        """Remove this process's own folder, unless a receipt names it; the shared one, if it is empty."""
        with suppress(OSError, QConvertError):  # in doubt, what a receipt may name stays
            # A signal can come between the name of a receipt and the look that would find it.
            self.look([path.stem for path in self.path.glob(f"*{_RECEIPT}")])
            if all(receipt.folder != self.own for receipt in self.receipts.values()):
                shutil.rmtree(self.own, ignore_errors=True)
            self.path.rmdir()

    def remove(self) -> None:
        """Remove all, once the output is finished."""
        _remove(self.path)

    @property
    def is_removed(self) -> bool:
        """Whether another process has removed the folder, or is about to."""
        return not (self.own.is_dir() and (self.path / _JOB).is_file())

    def is_first(self) -> bool:
        """Whether this process is the first to ask: of those that have all done the same, one tells of it."""
        try:
            os.close(os.open(self.path / _TELLS, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
            return True
        except (FileExistsError, FileNotFoundError):
            return False

    def look(self, tasks: Collection[str]) -> list[str]:
        """Read the receipts that are new; returns the tasks that have none."""
        names = {entry.name for entry in os.scandir(self.path)}
        for task in tasks:
            if task not in self.receipts and f"{task}{_RECEIPT}" in names:
                receipt = self._read(self.path / f"{task}{_RECEIPT}")
                if receipt is not None:
                    self.receipts[task] = receipt
        return [task for task in tasks if task not in self.receipts]

    def work(
        self,
        tasks: Sequence[str],
        do: Callable[[str], Sequence[Record]],
        heard: Callable[[str, bool], None],
        published: Callable[[], bool],
    ) -> None:
        """Do tasks in this order until all have receipts, and wait for those that others are at.

        `do` puts the files that it makes of a task into `own`, on the disk, and returns its records. `heard`
        is told of every task that is done, and whether this process did it. Raises Published when the output
        has its name.
        """
        told: set[str] = set()
        wait, most = WAIT_SECONDS
        while True:
            try:
                left = self.look(tasks)
                for task in [task for task in self.receipts if task not in told]:
                    told.add(task)
                    heard(task, self.receipts[task].folder == self.own)
                if not left:
                    return
                # After the look: the output has its name before its receipts are removed.
                if not published() and any(self._does(task, do) for task in left):
                    wait = WAIT_SECONDS[0]
                    continue
            except (OSError, QConvertError):
                if not published():
                    raise
            if published():
                raise Published
            time.sleep(wait)
            wait = min(2 * wait, most)

    def _does(self, task: str, do: Callable[[str], Sequence[Record]]) -> bool:
        """Do a task, unless another process is at it; whether it is done."""
        with self._claimed(task) as claimed:
            if claimed and self.look([task]):
                lines = whole(self._mark, {"folder": self._nonce}, do(task))
                try:
                    self._name(f"{task}{_RECEIPT}", lines)
                except FileExistsError:  # this process was assumed to be dead, and another was faster
                    (self.own / task).unlink(missing_ok=True)
            return claimed

    def _name(self, name: str, data: bytes) -> None:
        """Give a whole file its name in the shared folder; FileExistsError where there is one."""
        path = self.own / name
        with explained(f"{self.path / name}: cannot be created"):
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o666)
        try:
            write_exactly(fd, memoryview(data), 0, str(path))
            os.fsync(fd)
        finally:
            os.close(fd)
        sync(self.own)
        try:
            name_new(path, self.path / name)
        finally:
            path.unlink(missing_ok=True)
        sync(self.path)

    def _read(self, path: Path) -> Receipt | None:
        found = load(path)
        if found is None and not path.exists():
            return None
        folder = found.settings.get("folder") if found is not None else None
        if found is None or found.job != self._mark or not _OWN.fullmatch(str(folder)):
            raise QConvertError(
                f"{path}: is damaged, or of another job", f"remove {self.path}, and start again"
            )
        return Receipt(found.records, self.path / str(folder))

    @contextmanager
    def _claimed(self, task: str) -> Iterator[bool]:
        """Hold the claim on a task; False where another process does."""
        path = self.path / f"{task}{_CLAIM}"
        fd = self._claim(path, task)
        if fd is None:
            yield False
            return
        ended = threading.Event()
        touching = threading.Thread(target=_touch, args=(fd, ended), daemon=True)
        touching.start()
        try:
            yield True
        finally:
            ended.set()
            touching.join()
            os.close(fd)
            if _holder(path).get("folder") == self._nonce:
                path.unlink(missing_ok=True)

    def _claim(self, path: Path, task: str) -> int | None:
        """Claim a task that no process does; returns the open claim, None where another process has it."""
        holder = {"machine": _machine(), "process": os.getpid(), "folder": self._nonce}
        words = memoryview(json.dumps(holder).encode())
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            write_exactly(fd, words, 0, str(path))
            return fd
        except FileExistsError:
            pass
        before = _holder(path)
        gone = _is_gone(before)
        if not gone and not self._is_stale(path):
            return None
        if gone and self.look([task]):  # it can name no receipt any more, so what it left is not used
            (self.path / str(before["folder"]) / task).unlink(missing_ok=True)
        taken = self.own / path.name
        fd = os.open(taken, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        write_exactly(fd, words, 0, str(taken))
        taken.replace(path)
        if _holder(path).get("folder") == self._nonce:
            return fd
        os.close(fd)
        return None

    def _is_stale(self, path: Path) -> bool:
        """Whether a claim was not touched for long, by the clock of the file server."""
        clock = self.own / "clock"
        clock.touch()
        try:
            return clock.stat().st_mtime - path.stat().st_mtime > STALE_SECONDS
        except FileNotFoundError:
            return False


def _remove(folder: Path) -> None:
    """Remove a shared folder: receipts after the files that they record, and the job last."""
    with suppress(FileNotFoundError):
        entries = [each for each in folder.iterdir() if each.name != _JOB]
        for entry in sorted(entries, key=lambda each: not each.is_dir()):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        (folder / _JOB).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def _touch(fd: int, ended: threading.Event) -> None:
    while not ended.wait(TOUCH_SECONDS):
        os.utime(fd)


def _is_ours(entry: Path) -> bool:
    """Whether an entry can be of a folder that was being begun, or removed, when all were killed."""
    return bool(_OWN.fullmatch(entry.name)) or entry.suffix in (_RECEIPT, _CLAIM) or entry.name == _FINISHED


def _holder(path: Path) -> Json:
    """The owner of a claim; empty where it is gone, or not yet written."""
    with suppress(OSError, ValueError):
        found = json.loads(path.read_bytes()[:1000])
        if isinstance(found, dict) and _OWN.fullmatch(str(found.get("folder"))):
            return found
    return {}


def _is_gone(holder: Json) -> bool:
    """Whether a process of this machine has ended; False for what other machines run."""
    if holder.get("machine") != _machine() or not isinstance(holder.get("process"), int):
        return False
    try:
        os.kill(holder["process"], 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return False


@cache
def _machine() -> str:
    """What tells the numbers of this system's processes from others: a boot of a machine, and a container."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    except OSError:  # not Linux
        return socket.gethostname()
