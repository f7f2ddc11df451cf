"""`qconvert` from a process that has imported everything and forks for each command: seconds less for each.

A command has a process, files, a folder and an environment of its own, as if a shell had started Python;
nothing of it is left for the next. What it needs from a fresh process it cannot have: its memory is that of
all imports, so `--max-memory` wants a process that Python started.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_MOST_LINES = 12
"""So many fit into a pipe that nobody reads meanwhile."""
CLIENT = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [len(words).to_bytes(4, "big")], [0, 1, 2])
    server.sendall(words)
    code = server.recv(1)
sys.exit(code[0] if code else "qconvert: the command was killed")
"""


@contextlib.contextmanager
def warm_qconvert() -> Iterator[Path]:
    """A folder for PATH that has a `qconvert`; the process behind it ends with the context."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/socket"
        command = Path(folder, "qconvert")
        command.write_text(CLIENT.format(python=sys.executable, address=address), encoding="utf-8")
        command.chmod(0o755)
        words = [sys.executable, "-m", "tests.support.warm_commands", address]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}
        with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            try:
                assert server.stdout.readline() == b"ready\n", "the process of the commands has not started"
                yield Path(folder)
            finally:
                server.terminate()


def _serve(address: str) -> None:
    """Fork for every command that is asked for, until terminated; what one imports, the next ones have."""
    learnt, learning = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        print("ready", flush=True)
        while True:
            client, _ = listener.accept()
            with client:
                if os.fork() == 0:
                    listener.close()
                    os._exit(_answer(client, learning))
            _import_what_was(learnt)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:  # of those that have ended
                    pass


def _import_what_was(learnt: int) -> None:
    """Import what commands had imported when they ended, by the lines of a pipe that are there."""
    while select.select([learnt], [], [], 0)[0]:
        for name in os.read(learnt, select.PIPE_BUF).decode().split():
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def _answer(client: socket.socket, learning: int) -> int:
    size, files, *_ = socket.recv_fds(client, 4, 3)
    asked = b""
    while len(asked) < int.from_bytes(size, "big"):
        asked += client.recv(1 << 16)
    words, folder, environment = json.loads(asked)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    before = {*sys.modules}
    code = _ran(words)
    new = " ".join(name for name in sys.modules if name not in before)
    for line in textwrap.wrap(new, select.PIPE_BUF)[:_MOST_LINES]:
        os.write(learning, line.encode().ljust(select.PIPE_BUF))  # which is written and read whole
    client.send(bytes([code]))
    return code


def _ran(words: list[str]) -> int:
    """The exit code of a command; what it printed is written."""
    from qconvert.__main__ import main

    sys.argv = ["qconvert", *words]
    try:
        main()
    except SystemExit as ending:
        code: Any = ending.code
        return code if isinstance(code, int) else 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    return 0


if __name__ == "__main__":
    import torch  # noqa: F401 (for the commands that import it)

    from qconvert.cli import COMMANDS

    for name in COMMANDS:
        if name != "help":
            importlib.import_module(f"qconvert.cli.{name.replace('-', '_')}")
    _serve(sys.argv[1])
