"""A kernel's threads: torch's own where they can be had, as many as asked for; none waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from qconvert.quant.simd.lanes import kernel
from qconvert.runtime.cpu import thread_barrier
from qconvert.runtime.cpu.openmp_threads import call_in_openmp
from qconvert.runtime.cpu.thread_barrier import ThreadTeam, wait_for_all

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="torch has another OpenMP elsewhere")


@pytest.fixture(params=["torch's threads", "threads of ours"])
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "threads of ours":
        monkeypatch.setattr(thread_barrier, "call_in_openmp", lambda size, work: False)


class Stop(Exception):
    pass


@kernel
def wait(arrived, size):  # type: ignore[no-untyped-def]
    wait_for_all(arrived, size)


@pytest.mark.parametrize("broken", [0, 1])
def test_a_team_that_loses_a_thread_does_not_wait_for_it(broken: int, threads: None) -> None:
    team = ThreadTeam(2)

    def work(rank: int) -> None:
        if rank == broken:
            raise Stop
        wait(team.arrived.ctypes.data, team.size)

    with pytest.raises(Stop):
        team.run(work)
    met = []
    team.run(lambda rank: (wait(team.arrived.ctypes.data, team.size), met.append(threading.get_ident())))  # type: ignore[func-returns-value]
    assert len(set(met)) == 2


@linux_only
@pytest.mark.parametrize("size", [2, 3, 9])
def test_all_ranks_run_at_once_in_threads_that_stay(size: int) -> None:
    team, ranks = ThreadTeam(size), []
    for _ in range(2):
        ran: dict[int, int] = {}

        def work(rank: int, ran: dict[int, int] = ran) -> None:
            wait(team.arrived.ctypes.data, team.size)
            ran[rank] = threading.get_native_id()

        assert call_in_openmp(size, work)
        assert sorted(ran) == list(range(size)) and ran[0] == threading.get_native_id()
        ranks.append(set(ran.values()))
    assert ranks[0] == ranks[1]


FEWER = """
from qconvert.runtime.cpu.openmp_threads import call_in_openmp
from qconvert.runtime.cpu.thread_barrier import ThreadTeam
called = []
assert not call_in_openmp(2, called.append) and not called
ThreadTeam(2).run(called.append)
print(sorted(called))
"""


@linux_only
def test_threads_of_ours_run_where_openmp_has_too_few() -> None:
    limited = os.environ | {"OMP_THREAD_LIMIT": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", FEWER], env=limited, capture_output=True, text=True, check=False
    )
    assert ran.stdout == "[0, 1]\n", ran.stderr
