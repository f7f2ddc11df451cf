"""The time that is left, held against runs on a simulated clock."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import qconvert as library
from evals.synthetic import SHAPES
from qconvert.convert.job import Job
from qconvert.convert.outcome import BlockDone
from qconvert.convert.runner import BLOCK_BYTES, cut
from qconvert.convert.time_left import Work

THREADS = 2


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Job]]:
    """Conversions of a model of 0.5 billion parameters, by what they make, from its config alone."""
    folder = tmp_path_factory.mktemp("shape")
    (folder / "config.json").write_text(json.dumps(SHAPES["qwen2.5-0.5b"]))
    model = library.open_model(str(folder), plan_only=True)
    schemes = {"int4": ["int4-g128"], "int4 and int8": ["int4-g128", "int8-g128"]}
    return {
        name: [
            library.prepare(
                model,
                library.Request("quantize", library.Recipe(scheme=library.parse_scheme(each))),
                library.RunOptions(),
            )
            for each in asked
        ]
        for name, asked in schemes.items()
    }


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def simulated(
    jobs: list[Job],
    work: Work,
    clock: Clock,
    speeds: Callable[[str], float],
    verify: float,
    text: float = 0.0,
) -> Iterator[float | None]:
    """Tell the work of all blocks, in the order of the source, and of what is read back.

    `speeds` are the nanoseconds of a weight, by its encoding, `verify` those of a byte; blocks vary by a
    third, and before each that gets codes a text is read for `text` nanoseconds a weight. Yields what is said
    to be left at each of them.
    """
    chance = random.Random(5)
    units = [unit for job in jobs for unit in job.compiled.plan.units]
    order = {name: number for number, name in enumerate(dict.fromkeys(unit.source.name for unit in units))}
    for unit in sorted(units, key=lambda unit: order[unit.source.name]):
        for block in cut(unit, jobs[0].container.layout, BLOCK_BYTES):
            weights = (block.stop - block.start) * unit.source.width
            price = 1e-9 * speeds(unit.output.encoding.label) * chance.uniform(0.7, 1.3)
            clock.now += weights * price / THREADS
            clock.now += weights * text * 1e-9 if unit.quantizes else 0.0
            work.add(
                BlockDone(
                    unit,
                    block.start,
                    block.stop - block.start,
                    2 * weights,
                    (),
                    None,
                    False,
                    seconds=weights * price,
                )
            )
            yield work.left()
    for done in range(0, work.to_verify, 8 << 20):
        clock.now += (8 << 20) * verify * 1e-9 / THREADS
        work.verify(min(done + (8 << 20), work.to_verify), work.to_verify)
        yield work.left()


@pytest.mark.parametrize("kind", ["int4", "int4 and int8"])
@pytest.mark.parametrize("machine", [0.5, 1.0, 6.0])
@pytest.mark.parametrize(("copied", "coded", "read"), [(2, 7, 1.8), (2, 11, 1.8), (4, 8, 3.0), (1.5, 7, 1.2)])
def test_it_is_within_a_fifth_from_a_tenth_of_the_work_on(
    jobs: dict[str, list[Job]], kind: str, machine: float, copied: float, coded: float, read: float
) -> None:
    clock = Clock()
    own = jobs[kind]
    work = Work(
        [job.compiled.plan for job in own],
        [file for job in own for file in job.container.files(Path("o"))],
        clock,
    )
    assert work.left() is None

    def speeds(label: str) -> float:
        return machine * (copied if label == "bf16" else coded)

    begun = clock.now
    said = [(clock.now, left) for left in simulated(own, work, clock, speeds, machine * read)]
    whole = clock.now - begun
    worst = max(abs(at + (left or 0.0) - clock.now) / whole for at, left in said if at - begun >= whole / 10)
    assert worst <= 0.2
    assert (work.read, work.verified) == (work.to_read, work.to_verify) and work.left() == 0
    assert work.written == work.to_write


def test_codes_that_are_chosen_on_a_text_say_nothing_of_reading_back(jobs: dict[str, list[Job]]) -> None:
    """24 layers of the 0.5B shape, 64k tokens: 28 minutes were said to be left where it was 15."""
    clock, (job,) = Clock(), jobs["int4"]
    work = Work([job.compiled.plan], job.container.files(Path("o")), clock)
    begun = clock.now
    told = simulated([job], work, clock, lambda label: 2 if label == "bf16" else 700, 1.8, text=1500)
    said = [(clock.now, left) for left in told]
    whole = clock.now - begun
    worst = max(abs(at + (left or 0.0) - clock.now) / whole for at, left in said if at - begun >= whole / 10)
    assert worst <= 0.2


def test_blocks_of_an_earlier_run_take_no_time(jobs: dict[str, list[Job]]) -> None:
    clock = Clock()
    (job,) = jobs["int4"]
    work = Work([job.compiled.plan], clock=clock)
    units = job.compiled.plan.units
    for unit in units[: len(units) // 2]:
        work.add(BlockDone(unit, 0, unit.output.rows, 0, (), None, True))
    assert work.left() is None
    for unit in units[len(units) // 2 :][:20]:
        seconds = 1e-8 * unit.output.rows * unit.source.width
        clock.now += seconds
        work.add(BlockDone(unit, 0, unit.output.rows, 0, (), None, True, seconds=seconds))
    rest = sum(unit.output.rows * unit.source.width for unit in units[len(units) // 2 + 20 :])
    assert work.left() == pytest.approx(1e-8 * rest)
