"""Carries out a job together with other processes where its output is kept only at a destination.

Each process drops a file once it is verified and the destination has it: of the weights, at most the one that
a process is at is on the disk. Receipts and texts stay in the shared folder until the destination has made
all visible. That is asked there: nothing on this disk has the output's name.
"""

from __future__ import annotations

from pathlib import Path

from qconvert.convert.job import Job, Result
from qconvert.convert.known_as import KnownAs, known_as
from qconvert.convert.publish import Destination, weight_names
from qconvert.convert.run_memory import block_bytes_of
from qconvert.convert.shared_job import Done, SharedJob
from qconvert.convert.writing import Listener
from qconvert.core.dtypes import Json
from qconvert.core.ranks import Rank
from qconvert.errors import QConvertError
from qconvert.formats.io.shared_folder import SharedFolder, discard_shared, shared_folder


def execute_elsewhere(
    job: Job,
    out: Path,
    facts: tuple[Json, Json],
    rank: Rank,
    listen: Listener,
    done: Done,
    destination: Destination,
) -> Result | None:
    """Send the output of a job, called `out`, as one of several processes; the result if this one finished.

    None where it is there already, by another process or an earlier run of this very job. `facts` tell the
    job from others: at the destination, and on this disk. Raises what `ranks.execute_with_others` does.
    """
    there, here = facts
    known, weights = known_as(there), weight_names(job, out)

    def is_sent() -> bool:
        return destination.sent(known, weights) is not None

    if is_sent():
        if discard_shared(out, here):  # of a process that was killed when it was done
            destination.clear()
        return None
    destination.begin(known, weights, overwrite=job.options.overwrite, resumed=False)
    try:
        folder = SharedFolder(shared_folder(out), here, {"block_bytes": block_bytes_of(job)})
    except (OSError, QConvertError):
        if not is_sent():
            raise
        return None  # it was finished, and the folder removed, at this very moment
    try:
        if is_sent():  # since it was asked first: the folder may be a new one
            folder.remove()
            return None
        shared = _Elsewhere(job, out, folder, listen, done, destination)
        shared.known = known
        return shared.carried_out(rank)
    finally:
        folder.close()


class _Elsewhere(SharedJob):
    """One whose output gets no name on this disk."""

    known: KnownAs

    def is_published(self) -> bool:
        """Whether another process has finished: it removes the folder then, and before that nothing."""
        return self.folder.is_removed and self._is_sent()

    def _is_sent(self) -> bool:
        assert self.destination is not None
        return self.destination.sent(self.known, weight_names(self.job, self.out)) is not None

    def carried_out(self, rank: Rank) -> Result | None:
        try:
            self.require_sent()
        except (OSError, QConvertError):
            if not self._is_sent():
                raise
            self.overtaken()  # the folder was removed as it was looked at
            return None
        return super().carried_out(rank)

    def require_sent(self) -> None:
        """Raise QConvertError where the destination has lost what a receipt says that it took."""
        assert self.destination is not None
        overwrite = self.job.options.overwrite
        for again in (False, True):
            if again:  # what has come since `begin` was not known then
                self.destination.begin(
                    self.known, weight_names(self.job, self.out), overwrite=overwrite, resumed=False
                )
            lacking = [name for name, receipt in self._receipts().items() if not self._holds(name, receipt)]
            if not lacking:
                return
        raise QConvertError(
            f"{self.destination.shown}: {lacking[0]} was sent there, and is gone",
            f"remove {self.folder.path}, and run the same command again",
        )

    def _receipts(self) -> dict[str, str]:
        """What the destination has given for the files that are done, by name."""
        self.folder.look(self.files)
        found = {name: receipt.records[-1] for name, receipt in self.folder.receipts.items()}
        return {name: last[3] for name, last in found.items() if self.files[name].specs}

    def _holds(self, name: str, receipt: str) -> bool:
        assert self.destination is not None
        return self.destination.holds(name, self.files[name].size, receipt)

    def finished(self) -> Result | None:
        folder = self.folder
        try:
            record = self.completed(folder.finished)
            for name in (name for name, file in self.files.items() if not file.specs):
                self.placed(name, folder.finished)
            sent = self.publish(folder.finished)
            is_first = folder.is_first()
        except (OSError, QConvertError):
            if not self._is_sent():
                raise
            is_first = False
        folder.remove()
        return self.result(record, sent) if is_first else None
