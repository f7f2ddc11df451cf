"""Reads changed files until one does harm: `python -m tests.fuzz.hunt 1000000`.

Harm is an exception that is not ours (the command line would call it a bug), 5 seconds, or 500 MB. The same
seed changes the same files alike. What did harm is kept, with its reason beside it.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from qconvert.errors import QConvertError

# Of processor time: a machine may be busy with other work. What waits for something is given a minute.
SECONDS, BYTES = 5.0, 500_000_000
PATIENCE = 60.0


@dataclass(frozen=True)
class Harm:
    """What one input did: `why` is a traceback, or a sentence; `raw` the changed file."""

    kind: str
    number: int
    why: str
    raw: bytes


class TooLong(BaseException):
    """The time of an input is over; no reader can swallow it with its errors."""


def hunt(inputs: int, seed: int, only: Sequence[str] = ()) -> Iterator[Harm]:
    """Changes and reads so many files, of all kinds (or `only` some) in turn; yields what does harm."""
    from tests.fuzz.kinds import kinds

    warnings.simplefilter("ignore")
    with TemporaryDirectory() as name:
        found = kinds(Path(name))
        asked = [(kind, found[kind]) for kind in only or found for _ in range(found[kind].share)]
        debugged = os.environ.get("QCONVERT_DEBUG")
        os.environ["QCONVERT_DEBUG"] = "1"  # what is unexpected is told whole
        before = {each: signal.signal(each, _stop) for each in (signal.SIGALRM, signal.SIGPROF)}
        try:
            for number in range(inputs):
                kind, files = asked[number % len(asked)]
                path, raw = files.once(random.Random(f"{seed} {kind} {number}"))
                why = _harm(files.read, path)
                files.restore(path)
                if why is not None:
                    yield Harm(kind, number, why, raw)
        finally:
            os.environ.pop("QCONVERT_DEBUG")
            if debugged is not None:
                os.environ["QCONVERT_DEBUG"] = debugged
            for each, handler in before.items():
                signal.signal(each, handler)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise TooLong


def _harm(read: object, path: Path) -> str | None:
    assert callable(read)
    with suppress(OSError):  # on Linux: what was held before does not hide what is held now
        Path("/proc/self/clear_refs").write_text("5")
    most = _peak()
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    try:
        read(path)
    except QConvertError as error:
        if not error.fact or not error.hint:
            return f"an error without words: {error!r}"
    except TooLong:
        return f"ran over {SECONDS} s:\n{traceback.format_exc()}"
    except (Exception, BaseException):
        return traceback.format_exc()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
    grown = _peak() - most
    return f"grew by {grown:,} bytes" if grown > BYTES else None


def _peak() -> int:
    """The most memory that this process held, ever or since `_harm` began, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _all(inputs: int, seed: int, only: Sequence[str], folder: Path) -> list[Harm]:
    """What does harm, each kept in the folder as it is found: a hunt that is stopped has lost nothing."""
    gc.set_threshold(50_000, 50, 100)
    harms = list[Harm]()
    for harm in hunt(inputs, seed, only):
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{harm.kind.replace(' ', '-')}-{seed}-{harm.number}"
        path.write_bytes(harm.raw)
        path.with_name(f"{path.name}.txt").write_text(harm.why)
        harms.append(harm)
    return harms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", type=int, nargs="?", default=1_000_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", action="append", default=[], help="a kind of file; may be repeated")
    parser.add_argument("--keep", type=Path, default=Path("build/fuzz"), help="where harmful files are kept")
    asked = parser.parse_args()
    began, harms = time.monotonic(), list[Harm]()
    parts = min(asked.inputs, asked.jobs)  # each makes its sound files, which takes as long as some thousand
    each, rest = divmod(asked.inputs, parts)
    with ProcessPoolExecutor(asked.jobs) as pool:
        runs = [
            pool.submit(_all, each + (part < rest), asked.seed * 1000 + part, asked.only, asked.keep)
            for part in range(parts)
        ]
        for run in runs:
            harms += run.result()
    last = Counter(f"{harm.kind}: {harm.why.strip().splitlines()[-1][:150]}" for harm in harms)
    for line, count in last.most_common():
        print(f"{count:6}  {line}")
    took = time.monotonic() - began
    print(f"{asked.inputs:,} inputs, seed {asked.seed}, {took:.0f} s: {len(harms)} did harm")
    sys.exit(1 if harms else 0)


if __name__ == "__main__":
    main()
