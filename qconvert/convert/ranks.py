"""Carries out a job together with other processes, which share nothing but the folder of the output.

plan + world  ->  files in the order of this process  ->  blocks of their units  ->  verified file + receipt
receipts of all, in the order of the plan  ->  the outcome of one process  ->  what lies beside  ->  the name

With a destination, a receipt says that the file is there, too: each process sends its own before it names
their receipts, and makes all visible before it gives the output its name. So what has its name was sent.
Where nothing is kept on this disk, there is no name: see `ranks_elsewhere`.

Whoever finds all receipts finishes the output, and any number may try at once: a file is moved, or found
where it belongs; the other files are the same from every process; and the output gets its name by one rename.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path

from qconvert.convert.execute import with_all_scales
from qconvert.convert.existing import is_written
from qconvert.convert.job import Job, Result
from qconvert.convert.known_as import job_hash, known_as
from qconvert.convert.publish import Destination, weight_names
from qconvert.convert.ranks_elsewhere import execute_elsewhere
from qconvert.convert.run_memory import block_bytes_of
from qconvert.convert.send_written import send_where_lacking
from qconvert.convert.shared_job import Done, SharedJob, first_path
from qconvert.convert.writing import Listener, facts_of
from qconvert.core.dtypes import Json
from qconvert.core.ranks import Rank
from qconvert.errors import BadRecipe, OutputExists, QConvertError
from qconvert.formats.io.local_file import sync
from qconvert.formats.io.replacement import clear_replaced, inode, mark, marked, name_folder
from qconvert.formats.io.shared_folder import (
    SharedFolder,
    is_shared,
    settings_of,
    shared_folder,
)


def execute_with_others(
    job: Job,
    out: Path,
    rank: Rank,
    listen: Listener = lambda done: None,
    done: Done = lambda done, total: None,
    destination: Destination | None = None,
) -> Result | None:
    """Write the output of a job to `out`, as one of several processes; the result if this one named it.

    None means that another one has, and that the output is there. `listen` gets every block that any process
    has made, `done` every file. Raises what `execute` raises, and BadRecipe for a job that is
    not divided. What is overwritten keeps its name until the output is finished; an output of this very job
    is left, since it may be that of processes that were faster. With a `destination`, it goes there, too; or
    only there, where nothing is kept here.
    """
    refuse_undivided(job)
    job = with_all_scales(job, out)
    options = {"verify": job.options.verify, "hash_sources": job.options.hash_sources}
    sent = facts_of(job, out, destination)
    facts = {**sent, "options": options}
    if not job.options.keep:
        assert destination is not None
        return execute_elsewhere(job, out, (sent, facts), rank, listen, done, destination)
    if _is_there(job, out, facts):
        if destination is not None:
            send_where_lacking(job, out, destination)
        return None
    if destination is not None:
        weights = weight_names(job, out)
        destination.begin(known_as(sent), weights, overwrite=job.options.overwrite, resumed=False)
    settings = {"block_bytes": block_bytes_of(job), "replaces": _taken(job, out)}
    try:
        folder = SharedFolder(shared_folder(out), facts, settings)
    except (OSError, QConvertError):
        if not is_written(job, out) or settings["replaces"] == _taken(job, out) != {}:
            raise
        return None  # it was finished, and the folder removed, at this very moment
    try:
        return _Named(job, out, folder, listen, done, destination).carried_out(rank)
    finally:
        folder.close()


def refuse_undivided(job: Job) -> None:
    """Raise BadRecipe for a job whose files cannot be made apart from each other."""
    if job.calibration is None:
        return
    if not job.calibration.traits.together:
        raise BadRecipe(
            f"--method {job.calibration.method}: every process would measure the text for itself",
            "measure once with `qconvert calibrate`, and give all processes --calibration FILE",
        )
    raise BadRecipe(
        f"--method {job.calibration.method}: chooses codes layer after layer, which one process does",
        "give --rank 0/1, for a single process",
    )


def _is_there(job: Job, out: Path, facts: Json) -> bool:
    """Whether the output has its name; OutputExists where something else has it."""
    first, taken, shared = first_path(job, out), _taken(job, out), is_shared(out)
    if shared and settings_of(out).get("replaces", {}).get(first.name, "") == inode(first):
        return False
    if taken and not shared:
        if marked(first) == job_hash(facts):
            return is_written(job, out)
        job.container.check_target(out)
        return False
    try:
        found = is_written(job, out)
    except OutputExists:
        if not shared:
            raise
        return False  # the parts of a GGUF that have their names already
    if found and shared:  # the process that named it was killed before it removed this
        clear_replaced(out, settings_of(out).get("replaces", {}).get(out.name))
        shutil.rmtree(shared_folder(out), ignore_errors=True)
    return found


def _taken(job: Job, out: Path) -> dict[str, int]:
    """The inodes of what has the names of an output, where that may be overwritten."""
    names = [file.name for file in job.container.files(out)] if job.compiled.is_gguf else [out.name]
    found = {name: inode(out.with_name(name)) for name in names if job.options.overwrite}
    return {name: number for name, number in found.items() if number is not None}


class _Named(SharedJob):
    """One whose output gets its name on this disk, once it is where else it belongs."""

    @property
    def _first(self) -> Path:
        return first_path(self.job, self.out)

    @property
    def _replaces(self) -> Mapping[str, int]:
        found: Mapping[str, int] = self.folder.settings.get("replaces", {})
        return found

    def is_published(self) -> bool:
        return inode(self._first) not in (None, self._replaces.get(self._first.name))

    def overtaken(self) -> None:
        is_written(self.job, self.out)  # OutputExists, where the name was taken by something else
        super().overtaken()

    def finished(self) -> Result | None:
        job, folder, is_gguf = self.job, self.folder, self.job.compiled.is_gguf
        try:
            target = self.out.parent if is_gguf else folder.finished
            record = self.completed(target)
            if job.options.overwrite:
                mark(self._marked(target), folder.job)
            sent = self.publish(target) if is_gguf else {}
            replaces = self._replaces if is_gguf else {}
            named = [self.placed(name, target, replaces.get(name)) for name in reversed(self.files)][-1]
            if not is_gguf:
                sent = self.publish(target)
                old = self._replaces.get(self.out.name)
                named = _renamed(target, self.out, old, int(folder.own.name, 16))
                clear_replaced(self.out, old)
            sync(self.out.parent)
        except (OSError, QConvertError):
            if not self.is_published():
                raise
            named = False
        if not named:
            self.overtaken()
            return None
        folder.remove()
        return self.result(record, sent)

    def _marked(self, target: Path) -> Path:
        """What will have the name of the output: the folder, or the file that is the first part."""
        first = self._first.name
        return self.folder.receipts[first].folder / first if self.job.compiled.is_gguf else target


def _renamed(folder: Path, out: Path, old: int | None, own: int) -> bool:
    """Give a folder its final name, in place of the one with this inode; False where another has it."""
    try:
        name_folder(folder, out, old, own)
    except QConvertError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True
