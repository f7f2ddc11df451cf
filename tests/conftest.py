"""What every test may ask for: the folder of real checkpoints, or a skip with its reason."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.commands import made, of_any_size
from tests.support.instruction_sets import Digests
from tests.support.models import tiny
from tests.support.process_memory import keep_freed_memory, make_forks_cheap

# The threads of torch and numpy would otherwise wait for each other, or spin, on cores that the other tests
# need: models here are small, and what is said of threads is tested with as many as it says.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")  # where a command asks for more: 16 cycles, not 2**26
keep_freed_memory()
os.environ.pop("COLUMNS", None)  # what is printed does not depend on the terminal of whoever tests

# As `qconvert` has it, and for the same reason: every plan is many objects without cycles, beside the million
# of the modules that tests import. Looking through them for cycles took a fifth of the time.
gc.set_threshold(100_000, 20, 100)

# The same examples on every run: a red test means that the change before it broke something.
settings.register_profile("qconvert", deadline=None, derandomize=True, database=None)
settings.load_profile("qconvert")

# Started in the background, a shell makes a process ignore Ctrl-C, and its children with it; some
# tests send it to theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What is imported by now stays: no later collection looks at it."""
    gc.collect()
    gc.freeze()
    make_forks_cheap()


@pytest.fixture(scope="session", autouse=True)
def _of_any_size() -> Iterator[None]:
    """What this process has, with all its tests, says nothing of a command: no --max-memory is too little."""
    with of_any_size():
        yield


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of all workers of this run."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if base.name.startswith("popen-") else base


@pytest.fixture(scope="session")
def digests(request: pytest.FixtureRequest, shared: Path) -> Iterator[Digests]:
    """What modules of tests compute with every lesser set of instructions, for all workers of this run."""
    modules = {item.path.stem: item.module for item in request.session.items if _asks_for_digests(item)}
    found = Digests(shared, [(choice, name) for name, module in modules.items() for choice in module.SETS])
    yield found
    found.close()


@pytest.fixture(scope="session", autouse=True)
def _digests_computed_beside(request: pytest.FixtureRequest) -> None:
    """Start with the first test what some later ones ask for."""
    if any(_asks_for_digests(item) for item in request.session.items):
        request.getfixturevalue("digests").start()


def _asks_for_digests(item: pytest.Item) -> bool:
    return "digest_with" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real models, configs and broken files named by $QCONVERT_ASSETS."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "assets"
    folder = Path(os.environ.get("QCONVERT_ASSETS", default))
    if not folder.is_dir():
        pytest.skip(f"no assets: {folder} is not a folder (set QCONVERT_ASSETS)")
    return folder


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of models: plain and tied, fused, quantized, and one with a head equal to its embedding."""
    root = tmp_path_factory.mktemp("models")
    tiny(root / "plain", hidden_size=128, num_hidden_layers=1)
    made("fuse", root / "plain", "-o", root / "fused")
    made("quantize", root / "plain", "--bits", 8, "-o", root / "quantized")
    made("untie", root / "plain", "-o", root / "untied")
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"
