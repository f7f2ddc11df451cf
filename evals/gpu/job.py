"""What a section of a run is given, and how it goes on where a part of it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch

from evals.gpu.clock import synchronize
from evals.gpu.models import Maker
from evals.gpu.rows import Check, Note, Row, of_kind


@dataclass(frozen=True, slots=True)
class Job:
    """A device, the end of the section (of `time.monotonic`), and what earlier sections found.

    A `dry` job has the same parts at sizes that a CPU can bear.
    """

    device: torch.device
    deadline: float
    dry: bool = False
    earlier: tuple[Row, ...] = ()
    maker: Maker = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "maker", Maker(self.device))

    @property
    def left(self) -> float:
        """Seconds until the section ends."""
        return self.deadline - time.monotonic()

    def passed(self, subject: str) -> bool:
        """Whether something was checked, in all its cases, and found right."""
        checks = [check for check in of_kind(self.earlier, Check) if check.subject == subject]
        return bool(checks) and all(check.passed for check in checks)

    def unsound(self, subjects: Iterable[str]) -> list[Note]:
        """A note, in capitals, on every subject that must not be timed."""
        return [
            Note(f"{subject.upper()}: NOT TIMED, ITS CHECK DID NOT PASS")
            for subject in subjects
            if not self.passed(subject)
        ]


def attempt(job: Job, what: str, measure: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows of one measurement, or a note saying why there are none.

    Memory that ran out and calls that a version lacks cost their own rows only. A device that no
    longer answers ends the section: the error is raised again.
    """
    try:
        yield from measure()
    except Exception as error:  # whatever a peer or a driver raises
        first = (str(error).strip() or "no message").splitlines()[0]
        yield Note(f"{what}: {type(error).__name__}: {first[:200]}")
        synchronize(job.device)
    finally:
        if job.device.type == "cuda":
            torch.cuda.empty_cache()
