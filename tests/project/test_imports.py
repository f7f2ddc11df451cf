"""Holds that imports run one way: a folder imports only folders above it, and what loads when."""

from __future__ import annotations

import ast
import os
import re
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# The architecture. The picture in README shows the same list.
FOLDERS = (
    "errors",
    "demo",
    "core",
    "models",
    "quant",
    "ops",
    "runtime",
    "formats",
    "plan",
    "checkpoint",
    "calibrate",
    "report",
    "convert",
    "check",
    "evaluate",
    "cli",
)
# Flat modules of the package, beside `errors`: each may import every folder.
ENTRIES = ("__init__", "__main__")

# The folders, or modules, that may import a library at all.
LIBRARIES = {
    "auto_round": "evals",
    "bitsandbytes": "evals",
    "certifi": "checkpoint.network",
    "click": "cli evals",
    "cyllama": "evals",
    "datasets": "evals",
    "gguf": "models.gguf.identity quant.ggml evals",
    "gptqmodel": "evals",
    "hf_xet": "checkpoint.xet_ranges",
    "huggingface_hub": (
        "checkpoint.hub checkpoint.hub_errors checkpoint.hub_file checkpoint.xet_ranges "
        "convert.hub_repository evaluate evals"
    ),
    "ik_llama_cpp": "evals",
    "llama_cpp": "evals",
    "jinja2": "formats.tokenizers.chat_template",
    "llmcompressor": "evals",
    "lm_eval": "evaluate.lm_eval_adapter",
    "llvmlite": "quant runtime.cpu",
    "mlx": "evals",
    "mlx_lm": "evals",
    "obstore": "checkpoint.object_store convert.bucket",
    "numba": "quant runtime.cpu evals",
    "numpy": "core quant ops runtime formats checkpoint calibrate check convert evaluate plan.gguf evals",
    "safetensors": "formats.io.read_back evals",
    "threadpoolctl": "calibrate.input_sums",
    "tokenizers": "formats.tokenizers cli.generate evals",
    "torch": "runtime calibrate convert.calibrated evaluate cli.env cli.eval cli.generate evals",
    "tqdm": "cli",
    "transformers": "calibrate.transformers_engine evals",
    "triton": "runtime.cuda evals",
    "yaml": "plan.recipe convert.model_card convert.gguf_sidecars formats.huggingface.model_card_header",
}


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package and of the scripts: its name without "qconvert.", and its file."""
    for top, prefix in (("qconvert", ""), ("formats", "formats."), ("evals", "evals.")):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            if not (top == "qconvert" and parts[0] == "formats"):  # the link to the other folder
                yield (prefix + ".".join(parts)).removesuffix(".__init__"), path


MODULES = dict(modules())


@cache
def imports_of(name: str) -> frozenset[str]:
    """What a file imports anywhere, also inside functions and for the type checker alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, "relative imports give a module two names"
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {each for each in whole if each.removeprefix("qconvert.") in MODULES}
            found |= known or {node.module}
    return frozenset(found)


def own_imports(name: str) -> set[str]:
    """The modules of the package that a module imports, without "qconvert."."""
    own = {each for each in imports_of(name) if each.startswith(("qconvert.", "evals."))}
    return {each.removeprefix("qconvert.") for each in own} - {name}


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("evals")])
def test_a_folder_imports_only_folders_above_it(name: str) -> None:
    folder = name.split(".", maxsplit=1)[0]
    if folder in ENTRIES:
        return
    assert folder in FOLDERS, f"{name}: not in a folder of the architecture"
    for imported in own_imports(name):
        other = imported.split(".")[0]
        assert other in FOLDERS, f"{name} imports {imported}"
        assert FOLDERS.index(other) <= FOLDERS.index(folder), f"{name} imports {imported}, which is below it"


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {name: own_imports(name) & MODULES.keys() for name in MODULES}
    while True:
        leaves = {name for name, imported in left.items() if not imported}
        if not leaves:
            break
        left = {name: imported - leaves for name, imported in left.items() if name not in leaves}
    assert not left, f"in a circle, or behind one: {left}"


def test_every_folder_of_the_list_exists() -> None:
    assert {name.split(".")[0] for name in MODULES} - {*ENTRIES, "evals"} == set(FOLDERS)


# Drivers of clients run in environments of their own.
@pytest.mark.parametrize("name", [name for name in MODULES if "client_drivers" not in name])
def test_libraries_are_imported_where_they_belong(name: str) -> None:
    for imported in imports_of(name):
        library = imported.split(".")[0]
        if library in ("qconvert", "evals") or library in sys.stdlib_module_names:
            continue
        assert library in LIBRARIES, f"{name} imports {library}, which is not declared"
        places = LIBRARIES[library].split()
        assert any(f"{name}.".startswith(f"{place}.") for place in places), f"{name} imports {library}"


def test_the_table_of_libraries_names_nothing_that_is_gone() -> None:
    listed = set(" ".join(LIBRARIES.values()).split())
    assert {place for place in listed if not any(f"{n}.".startswith(f"{place}.") for n in MODULES)} == set()


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


@pytest.mark.parametrize(
    "command", ["--help", "--version", "quantize --help", "convert --help", "no-such-command --json"]
)
def test_help_loads_nothing_heavy(command: str) -> None:
    code = (
        "import sys\nfrom qconvert.cli import main\n"
        f"try: main({command.split()!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "LOADED"


def test_importing_the_package_and_planning_load_nothing_heavy() -> None:
    names = "qconvert, qconvert.cli, qconvert.models, qconvert.plan.recipe, qconvert.plan.selectors"
    names += ", qconvert.plan.plan, qconvert.models.parameter_table"
    code = f"import sys, {names}\nprint([n for n in {HEAVY!r} if n in sys.modules])"
    assert run_python("-c", code).stdout == "[]\n"


def test_converting_never_loads_torch(tmp_path: Path) -> None:
    from tests.support.models import tiny

    model = tiny(tmp_path / "m")
    code = (
        "import sys\nfrom qconvert.cli import main\n"
        f"try: main(['quantize', {str(model)!r}, '--bits', '4', '-q', '-o', {str(tmp_path / 'q')!r}])\n"
        "except SystemExit as end: print(end.code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == "0 False False"


@pytest.mark.parametrize(("asked", "threads"), [(None, 1), ("2", 2)])
def test_threads_of_numpy_do_not_spin_beside_ours(
    asked: str | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that wait for the next small product took 44 % of the processor time of a calibrated run."""
    monkeypatch.delenv("OPENBLAS_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", asked)
    code = (
        "from qconvert.cli import main\n"
        "try: main(['--version'])\n"
        "except SystemExit: import numpy, threadpoolctl\n"
        "print(*[a['num_threads'] for a in threadpoolctl.threadpool_info() if a['user_api'] == 'blas'])"
    )
    assert run_python("-c", code).stdout.splitlines()[-1] == str(threads)


def test_help_takes_under_three_tenths_of_a_second() -> None:
    def seconds() -> float:  # of processor time, which other work on the machine does not stretch
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run_python("-m", "qconvert", "--help")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert statistics.median(seconds() for _ in range(5)) < 0.3


def test_carrying_packed_codes_loads_no_compiler(tmp_path: Path) -> None:
    """A repack takes its words over as they are, without the half second that numba takes to start."""
    from tests.support.models import tiny

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


def test_the_architecture_page_and_its_picture_show_these_folders() -> None:
    shown = [folder for folder in FOLDERS if folder not in ("errors", "demo")]
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("<!-- folders -->")[2]
    rows = re.findall(
        r"^\| `(?:qconvert/)?(\w+)/` \|", table.partition("<!-- end of folders -->")[0], re.MULTILINE
    )
    assert rows == shown
    picture = (ROOT / "docs" / "architecture.svg").read_text(encoding="utf-8")
    assert sorted(re.findall(r">(\w+)/<", picture)) == sorted(shown)
