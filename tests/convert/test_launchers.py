"""Processes of torchrun, Slurm and MPI know which they are, and make what one makes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from qconvert.cli.launchers import LAUNCHERS, TORCHRUN, launched
from qconvert.core.ranks import Rank
from tests.support.crashes import ended, running, started
from tests.support.rank_jobs import KINDS, impatient, rank, same, with_whole


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, and what one process makes of it."""
    return with_whole(tmp_path_factory.mktemp("launchers"), ["shards"])


@pytest.fixture(autouse=True)
def there(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of the model, in which nobody waits for long."""
    yield from impatient(root, monkeypatch)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Rank(1, 4)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, Rank(0, 1)),
        ({"RANK": "4", "WORLD_SIZE": "4"}, None),
        ({"RANK": "one", "WORLD_SIZE": "4"}, None),
        ({}, None),
        ({"SLURM_PROCID": "2", "SLURM_NTASKS": "3"}, Rank(2, 3)),
        (
            {"SLURM_ARRAY_TASK_ID": "5", "SLURM_ARRAY_TASK_COUNT": "8", "SLURM_ARRAY_TASK_MIN": "1"},
            Rank(4, 8),
        ),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, Rank(1, 2)),
    ],
)
def test_launchers_say_which_process_this_is(environment: dict[str, str], expected: Rank | None) -> None:
    assert launched(environment, LAUNCHERS) == expected
    assert launched(environment, (TORCHRUN,)) == (expected if "RANK" in environment else None)


DYING = """
import os, sys, time
from pathlib import Path
from qconvert.cli import main
calls = {"open", "os.link", "os.remove", "os.rename"}
def die(event, said):
    # A receipt is there, and the next call that touches a file would be work; the folder is not whole yet.
    if event in calls and list(Path("made").glob("out.partial-ranks/*.receipt")):
        os.kill(os.getpid(), 9)
died = Path("died")
if os.environ["RANK"] == "0" and not died.exists():
    died.touch()
    sys.addaudithook(die)
elif os.environ["RANK"] != "0" and not list(Path("made").glob("out*")):
    time.sleep(60)  # until its agent ends it: not while it finishes the folder and has not said so
main(sys.argv[1:])
"""


def agent(root: Path, processes: int, *how: object) -> subprocess.Popen[str]:
    """An elastic agent of torchrun, with some processes; the first of all dies once."""
    (root / "dying.py").write_text(DYING)
    (root / "died").unlink(missing_ok=True)
    command, name = KINDS["shards"]
    words = ("-m", "torch.distributed.run", *how, "--nproc-per-node", processes, "--max-restarts", 2)
    called = [*words, "dying.py", *command, "-j", 1, "-o", f"made/{name}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    return subprocess.Popen(
        [sys.executable, *map(str, called)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_torchrun_restarts_a_killed_process(root: Path) -> None:
    """The elastic agent ends the others and starts all anew; what has a receipt stays."""
    Path("made").mkdir()
    with agent(root, 2, "--standalone") as one:
        out, err = one.communicate(timeout=300)
    assert one.returncode == 0 and "exitcode: -9" in err, err
    assert same("shards") and out.count("total") == 1


def test_two_agents_of_torchrun_make_one_output(root: Path) -> None:
    """As on two machines: they meet at a port, and a process of one of them is killed."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    Path("made").mkdir()
    meeting = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}")
    agents = [agent(root, 1, *meeting, "--node-rank", number) for number in (0, 1)]
    with agents[0] as first, agents[1] as second:
        told_ = [each.communicate(timeout=300) for each in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0], told_
    assert same("shards") and sum(out.count("total") for out, _ in told_) == 1


LAUNCHED: dict[str, list[dict[str, str]]] = {
    # Of an array its tasks come in any order; each is its own srun, too.
    "slurm array": [
        {"SLURM_ARRAY_TASK_ID": n, "SLURM_ARRAY_TASK_COUNT": "3", "SLURM_ARRAY_TASK_MIN": "1"}
        | {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
        for n in ("3", "1", "2")
    ],
    "srun": [{"SLURM_PROCID": str(n), "SLURM_NTASKS": "3", "SLURM_LOCALID": str(n)} for n in range(3)],
    "mpirun": [
        {"OMPI_COMM_WORLD_RANK": str(n), "OMPI_COMM_WORLD_SIZE": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}
        for n in range(3)
    ],
}


@pytest.mark.parametrize("at_once", [True, False], ids=["at once", "in turn"])
@pytest.mark.parametrize("launcher", LAUNCHED)
def test_processes_of_a_launcher_make_what_one_makes(launcher: str, at_once: bool) -> None:
    """Each process knows its launcher's variables alone; --rank auto finds them."""
    words = [word if word != "0/3" else "auto" for word in rank("shards", 0, 3)]

    def process(variables: dict[str, str]) -> int:
        def work() -> None:
            os.environ.update(variables)
            running(*words)()

        return started(work)

    if at_once:
        children = [process(variables) for variables in LAUNCHED[launcher]]
        assert [ended(child) for child in children] == [0, 0, 0]
    else:
        assert [ended(process(variables)) for variables in LAUNCHED[launcher]] == [0, 0, 0]
    assert same("shards")
