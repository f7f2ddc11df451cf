"""The walls between the rooms, walked over the source: who imports whom, and what loads when.

A function that needs two rooms is two functions; an import that crosses a wall is how one begins.
"""

from __future__ import annotations

import ast
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"qconvert": "qconvert", "formats": "qconvert.formats", "evals": "qconvert.evals"}

# Every module has a room; the longest prefix decides. (Names without the leading "qconvert.")
ROOMS = {
    "vocabulary": "__init__ errors codes tensors interfaces numbers schemes sizes gguf gguf.types",
    "names": "architecture",
    "decisions": "recipe select plan draft relayout targets census loaders "
    "lint actorder padding tensor_parallel gguf.draft gguf.units gguf.forms gguf.rules gguf.mix",
    "operations": "ops grid_ops",
    "numbers": "quant decoder",
    "bytes": "formats hub",
    "layouts": "formats.layouts formats.checkpoint formats.weights",
    "runner": "run refusals",
    "words": "card manifest tables report report_html svg audit compare convert gguf.convert warm demo",
    "evals": "evals",
    "cli": "cli __main__",
}
# Which rooms a room may import, beside itself and the vocabulary.
DOORS = {
    "vocabulary": "",
    "names": "",
    "decisions": "names operations",
    "operations": "numbers",
    "numbers": "",
    "bytes": "names layouts",
    "layouts": "names bytes numbers",
    "runner": "decisions operations bytes",
    "words": "names decisions operations numbers bytes layouts runner",
    "evals": "names decisions operations numbers bytes layouts runner words",
    "cli": "names decisions operations numbers bytes layouts runner words evals",
}
# Single imports that the design asks for: where the embedded model lies is a name like any other, and
# packed codes are unpacked when somebody looks at them.
PASSES = {("hub", "demo"), ("codes", "quant.packing")}

# Which modules may import a library at all, by prefix.
LIBRARIES = {
    "bitsandbytes": "evals",
    "click": "cli evals",
    "cyllama": "evals",
    "gguf": "architecture.gguf.identity quant.ggml evals",
    "huggingface_hub": "hub evals",
    "jinja2": "formats.chat_template",
    "llvmlite": "quant decoder.cpu",
    "numba": "quant decoder.cpu",
    "numpy": "quant ops decoder formats run compare warm evals demo gguf.convert gguf.draft",
    "safetensors": "formats.verify evals demo.train",
    "tokenizers": "evals demo formats cli.generate",
    "torch": "decoder evals demo.train cli.env cli.evaluate cli.generate",
    "tqdm": "cli",
    "transformers": "evals demo.train",
    "triton": "decoder.cuda",
    "yaml": "recipe card formats.front_matter",
}


def short(name: str) -> str:
    return name.removeprefix("qconvert").removeprefix(".") or "__init__"


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package: its name without "qconvert.", and its file."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if folder == "qconvert" and parts[0] in FOLDERS:
                continue  # the links to the other two folders
            name = ".".join([package, *parts]).removesuffix(".__init__")
            yield short(name), path


MODULES = dict(modules())


class Imports(ast.NodeVisitor):
    """The modules that a file imports anywhere but for the type checker."""

    def __init__(self) -> None:
        self.found: set[str] = set()

    def visit_If(self, node: ast.If) -> None:
        for child in node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else [*node.body, *node.orelse]:
            self.visit(child)

    def visit_Import(self, node: ast.Import) -> None:
        self.found |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0 and node.module, "relative imports give a module two names"
        whole = {f"{node.module}.{alias.name}" for alias in node.names}
        known = {name for name in whole if name.removeprefix("qconvert.") in MODULES}
        self.found |= known or {node.module}


def imports_of(name: str) -> set[str]:
    visitor = Imports()
    visitor.visit(ast.parse(MODULES[name].read_text(encoding="utf-8")))
    return visitor.found


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def room_of(name: str) -> str:
    held = [
        (len(prefix), room)
        for room, prefixes in ROOMS.items()
        for prefix in prefixes.split()
        if within(name, prefix)
    ]
    assert held, f"{name}: a module without a room; give it one in ROOMS"
    return max(held)[1]


@pytest.mark.parametrize("name", MODULES)
def test_no_import_crosses_a_wall(name: str) -> None:
    room = room_of(name)
    open_to = {room, "vocabulary", *DOORS[room].split()}
    for imported in imports_of(name):
        if imported.split(".")[0] != "qconvert":
            continue
        target = short(imported)
        if (name, target) not in PASSES:
            assert room_of(target) in open_to, f"{name} ({room}) imports {target} ({room_of(target)})"


@pytest.mark.parametrize("name", MODULES)
def test_libraries_are_imported_where_they_belong(name: str) -> None:
    for imported in imports_of(name):
        library = imported.split(".")[0]
        if library == "qconvert" or library in sys.stdlib_module_names:
            continue
        assert library in LIBRARIES, f"{name} imports {library}, which is not declared"
        assert any(within(name, prefix) for prefix in LIBRARIES[library].split()), f"{name} imports {library}"


def test_the_tables_name_nothing_that_is_gone() -> None:
    listed = set(" ".join([*ROOMS.values(), *LIBRARIES.values()]).split())
    listed |= {end for edge in PASSES for end in edge}
    assert {prefix for prefix in listed if not any(within(name, prefix) for name in MODULES)} == set()


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True, env=env)


HEAVY = (
    "torch",
    "numpy",
    "numba",
    "transformers",
    "yaml",
    "huggingface_hub",
    "tokenizers",
    "safetensors",
    "tqdm",
    "triton",
)


@pytest.mark.parametrize("command", ["--help", "--version", "quantize --help", "no-such-command --json"])
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom qconvert.cli import main\n"
        f"try: main({command.split()!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "LOADED"


def test_importing_the_package_and_planning_load_nothing_heavy() -> None:
    names = "qconvert, qconvert.cli, qconvert.architecture, qconvert.recipe, qconvert.select, qconvert.plan"
    code = f"import sys, {names}, qconvert.census\nprint([n for n in {HEAVY!r} if n in sys.modules])"
    assert run_python("-c", code).stdout == "[]\n"


def test_converting_never_loads_torch(tmp_path: Path) -> None:
    from tests.models import tiny

    model = tiny(tmp_path / "m")
    code = (
        "import sys\nfrom qconvert.cli import main\n"
        f"try: main(['quantize', {str(model)!r}, '--bits', '4', '-q', '-o', {str(tmp_path / 'q')!r}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "0 False False"


def test_help_takes_under_three_tenths_of_a_second() -> None:
    def seconds() -> float:  # of processor time, which other work on the machine does not stretch
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_python("-m", "qconvert", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert statistics.median(seconds() for _ in range(5)) < 0.3


def test_carrying_packed_codes_loads_no_compiler(tmp_path: Path) -> None:
    """A repack takes its words over as they are, without the half second that numba takes to start."""
    from tests.models import tiny

    source = tiny(tmp_path / "plain")
    scheme = ["--scheme", "int4-g32", "--to", "gptq"]
    run_python("-m", "qconvert", "convert", str(source), *scheme, "-o", str(tmp_path / "gptq"))
    code = (
        "import sys\nfrom qconvert.cli import main\n"
        f"try: main(['convert', {str(tmp_path / 'gptq')!r}, '--to', 'compressed-tensors', "
        f"'-o', {str(tmp_path / 'out')!r}])\nexcept SystemExit as end: assert not end.code\n"
        "print('numba' in sys.modules)"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "False"
