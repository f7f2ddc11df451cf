"""What kernels compute with other instruction sets; and triton's interpreter, patched once for a launch."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable

import pytest

from tests.support.same_bits import asked

if os.environ.get("TRITON_INTERPRET") == "1":
    from evals.interpreted import patch_once

    patch_once()

_REPORTS = """
import importlib, json, traceback
found = {}
for name in ("byte_tiles", "row_passes", "running_softmax", "tile_products"):
    try:
        found[name] = importlib.import_module(f"tests.runtime.test_{name}").digest()
    except Exception:
        found[name] = "failed: " + traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="session")
def digest_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], str]:
    """What `digest()` of a module of tests gives with a set of instructions: of all modules at once.

    Torch and the compiler take three seconds to start, so the process is one, and what it found is for all
    workers of this run.
    """
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith("popen-") else base

    def of(choice: str, module: str) -> str:
        with (shared / f"instructions-{choice}.json").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # who comes second waits, and reads
            if not file.seek(0, os.SEEK_END):
                ran = asked(choice, _REPORTS)
                assert not ran.returncode, ran.stderr
                file.write(ran.stdout.splitlines()[-1])
            file.seek(0)
            found: dict[str, str] = json.load(file)
        assert not found[module].startswith("failed: "), found[module]
        return found[module]

    return of
