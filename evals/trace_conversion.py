"""Counts the functions, files and changes of file that one tensor passes from the command to the bytes.

`python evals/trace_conversion.py [gguf|int4] [--list]` converts a model of one layer, with one thread of
work and a profile hook in every thread: to a Q4_K GGUF, and to fused int4 compressed-tensors. The tensor
is `model.layers.0.self_attn.q_proj.weight`. `--list` prints the way, helpers indented.

A function is on the way of the tensor when one of its calls

1. is handed the tensor or returns it: an argument or the result is the tensor's name (of the source, of
   the output, or of one of its arrays), or a small record that holds such a name; or
2. lies below a call of rule 1 and is handed or returns numbers: an array, bytes, or a small record that
   holds an array; or
3. is on the stack of a call of rule 1 or 2: the command, the passes, the runner.

Functions stand in the order of the first call that counts, and a change of file is between two
neighbours of that order. Three counts are printed:

- `way`: what a reader jumps to. A private function (named `_...`, of a private class, or nested) belongs
  to the function of its file that calls it. Properties, and functions whose body is one statement beside
  the docstring, are names for an expression, and belong to the line that uses them.
- `way and helpers`: private functions too, so that renaming one moves nothing out of sight.
- `strict`: every function of the package that is entered at all, on the way or not.

No count holds lambdas, comprehensions, generated methods of dataclasses, or what imports and numba's
compiler call (an untraced conversion before fills the caches on disk). A compiled kernel is one function,
whatever it calls inside. A reader had counted, by hand, 82 functions in 40 files with 70 changes of file
(gguf) and 60, 31, 46 (int4) in a tree where `way` is 64, 33, 53 and 71, 36, 57: 142 functions and 135.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # `evals` is a folder of scripts, not installed

from evals import synthetic
from evals.speed_gguf import stand_in_tokenizer

NAMES = ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.qkv_proj", "blk.0.attn_q.")
"""How names of the tensor begin: in the source, fused in the output, in GGUF."""
CONVERSIONS = {
    "gguf": ["to-gguf", "--type", "q4_k_m"],
    "int4": ["quantize", "--bits", "4", "--fuse", "qkv"],
}
_NUMBERS = ("ndarray", "memoryview", "bytes", "bytearray")
_FEW, _DEPTH = 4, 3
"""A record is small when it nests no deeper and holds no longer sequences."""


Place = tuple[str, int, str]
"""A function: its file, its first line and its name; two of equal text are equal as code objects."""


def place(code: CodeType) -> Place:
    """The function that a code object is of."""
    return code.co_filename, code.co_firstlineno, getattr(code, "co_qualname", code.co_name)


@dataclass(slots=True)
class Call:
    """A call in progress: what it runs, when it began, and which rules hold of it."""

    code: CodeType
    number: int
    below: bool
    """Whether a call of rule 1 is on the stack above it."""
    named: bool = False
    """Whether rule 1 holds."""
    foreign: bool = False
    """Whether it serves an import or a compiler."""


@dataclass(slots=True)
class Trace:
    """What a run entered: every function's first call, and the first that is on the way."""

    root: Path
    entered: dict[Place, int] = field(default_factory=dict)
    passed: dict[Place, int] = field(default_factory=dict)
    _calls: int = 0
    _stacks: dict[int, list[Call]] = field(default_factory=dict)

    def hook(self, frame: FrameType, event: str, value: object) -> None:
        """What `sys.setprofile` calls."""
        if event not in ("call", "return") or not self.is_ours(frame.f_code):
            return
        if event == "call":
            arguments = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
            names = frame.f_code.co_varnames[:arguments]
            module = "" if frame.f_back is None else frame.f_back.f_globals.get("__name__", "")
            foreign = module.startswith(("numba", "importlib"))
            self.enter(frame.f_code, [frame.f_locals.get(name) for name in names], foreign)
        else:
            self.leave(frame.f_code, value)

    def is_ours(self, code: CodeType) -> bool:
        return code.co_filename.startswith((f"{self.root}/qconvert/", f"{self.root}/formats/"))

    def enter(self, code: CodeType, values: Iterable[object], foreign: bool) -> None:
        stack = self._stacks.setdefault(threading.get_ident(), [])
        above = stack[-1] if stack else None
        self._calls += 1
        foreign = foreign or code.co_name == "<module>" or (above is not None and above.foreign)
        below = above is not None and (above.below or above.named)
        stack.append(Call(code, self._calls, below, foreign=foreign))
        if not foreign:
            self.entered.setdefault(place(code), self._calls)
            self._judge(stack, values)

    def leave(self, code: CodeType, value: object) -> None:
        """The call that began last ends with this result."""
        stack = self._stacks.get(threading.get_ident(), [])
        if stack and stack[-1].code is code:
            if not stack[-1].foreign:
                self._judge(stack, [value])
            stack.pop()

    def _judge(self, stack: list[Call], values: Iterable[object]) -> None:
        call, parts = stack[-1], [part for value in values for part in _parts(value)]
        call.named = call.named or any(isinstance(part, str) and part.startswith(NAMES) for part in parts)
        if call.named or (call.below and any(type(part).__name__ in _NUMBERS for part in parts)):
            for each in stack:
                where = place(each.code)
                self.passed[where] = min(each.number, self.passed.get(where, each.number))


def _parts(value: object, depth: int = _DEPTH) -> Iterator[object]:
    """A value, and the parts of a small record."""
    yield value
    parts: Iterable[object] = ()
    if isinstance(value, tuple | list):
        parts = value if len(value) <= _FEW else ()
    elif is_dataclass(value):
        parts = [getattr(value, each.name, None) for each in fields(value)]
    for part in parts if depth else ():
        yield from _parts(part, depth - 1)


@dataclass(frozen=True, slots=True)
class Step:
    """A function on a way."""

    name: str
    file: str
    line: int

    @property
    def is_helper(self) -> bool:
        """Whether it is private to its file, or nested in another function."""
        parts = self.name.split(".")
        return any(part == "<locals>" or (part[0] == "_" and not part.endswith("__")) for part in parts)


@dataclass(frozen=True, slots=True)
class Way:
    """Functions in the order in which they were met."""

    steps: tuple[Step, ...]

    @property
    def counts(self) -> tuple[int, int, int]:
        """Functions, files, changes of file."""
        files = [step.file for step in self.steps]
        changes = sum(a != b for a, b in pairwise(files))
        return len(files), len(set(files)), changes

    def without_helpers(self) -> Way:
        """The functions that are not private to their file."""
        return Way(tuple(step for step in self.steps if not step.is_helper))


def way_of(places: Mapping[Place, int], root: Path, *, strict: bool = False) -> Way:
    """The functions of a trace in order; names for an expression are left out unless `strict`."""
    steps = [
        Step(name, str(Path(file).resolve().relative_to(root)), line)
        for file, line, name in sorted(places, key=lambda place: places[place])
        if not name.rpartition(".")[2].startswith("<") and (strict or line not in _minor(file))
    ]
    return Way(tuple(steps))


@cache
def _minor(file: str) -> frozenset[int]:
    """First lines of the properties and of the functions of one statement in a file."""
    found = set()
    for node in ast.walk(ast.parse(Path(file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(each).split("(")[0] for each in node.decorator_list}
            body = node.body[ast.get_docstring(node) is not None :]
            alone = len(body) == 1 and not isinstance(body[0], _BLOCKS)
            if alone or decorators & {"property", "cached_property", "functools.cached_property"}:
                found.add(min([node.lineno, *(each.lineno for each in node.decorator_list)]))
    return frozenset(found)


_BLOCKS = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match)


def trace(arguments: list[str], root: Path) -> Trace:
    """Run a command of qconvert under the hook."""
    from qconvert.cli import main

    found = Trace(root)
    with _kernels_seen(found), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        threading.setprofile(found.hook)
        sys.setprofile(found.hook)
        try:
            main(arguments)
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return found


@contextmanager
def _kernels_seen(found: Trace) -> Iterator[None]:
    """Calls of compiled kernels, which no profile hook sees, go into the trace as well."""
    from numba.core import registry

    dispatcher: Any = registry.CPUDispatcher
    plain = dispatcher.__call__

    def kernel(self: Any, *args: object) -> object:
        code = self.py_func.__code__
        if not found.is_ours(code):
            return plain(self, *args)
        found.enter(code, args, foreign=False)
        result = plain(self, *args)
        found.leave(code, result)
        return result

    dispatcher.__call__ = kernel
    try:
        yield
    finally:
        dispatcher.__call__ = plain


def make_model(folder: Path) -> Path:
    """Write a Qwen2 of one layer, of the smallest sizes that Q4_K and groups of 128 divide."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "vocab_size": 256,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    synthetic.SHAPES["trace"] = {**synthetic.SHAPES["qwen2.5-0.5b"], **sizes}
    synthetic.make_checkpoint(folder, "trace")
    (folder / "tokenizer.json").write_text(json.dumps(stand_in_tokenizer()), encoding="utf-8")
    return folder


def measure(conversion: str, model: Path, work: Path, root: Path) -> Trace:
    """Convert in another process, which fills the caches on disk, then in this one under the hook."""
    out = work / ("out.gguf" if conversion == "gguf" else "out")
    verb, *options = CONVERSIONS[conversion]
    arguments = [verb, str(model), *options, "-j", "1", "-q", "--overwrite", "-o", str(out)]
    command = [sys.executable, "-m", "qconvert", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run(command, check=True, capture_output=True, env=environment)
    return trace(arguments, root)


def report(conversion: str, found: Trace, *, listed: bool) -> Iterator[str]:
    """The three counts of a conversion, and its way."""
    way, strict = way_of(found.passed, ROOT), way_of(found.entered, ROOT, strict=True)
    for title, each in (("way", way.without_helpers()), ("way and helpers", way), ("strict", strict)):
        counted = "{} functions in {} files with {} changes of file".format(*each.counts)
        yield f"{conversion}: {title}: {counted}"
    for step in way.steps if listed else ():
        yield f"{'      ' if step.is_helper else '  '}{step.file}:{step.line} {step.name}"


@click.command()
@click.argument("conversion", type=click.Choice(list(CONVERSIONS)), required=False)
@click.option("--list", "listed", is_flag=True, help="Print the way.")
def main(conversion: str | None, listed: bool) -> None:
    """Count the functions that one tensor passes; without a name, in both conversions."""
    if conversion is None:  # each in a process of its own, whose caches in memory are empty
        for each in CONVERSIONS:
            subprocess.run([sys.executable, __file__, each, *(["--list"] * listed)], check=True)
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        found = measure(conversion, make_model(work / "model"), work, ROOT)
    click.echo("\n".join(report(conversion, found, listed=listed)))


if __name__ == "__main__":
    main()
