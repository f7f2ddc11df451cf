"""The distributions as a user gets them: one top-level name, everything inside, nothing twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("qconvert", "formats")
DATA = {"qconvert/py.typed", "qconvert/manifest.schema.json"} | {
    f"qconvert/calibrate/default_text/{name}" for name in ("documents.jsonl.xz", "LICENSES.txt", "README.md")
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    copy = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(copy / "dist"), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the wheel is installed into, far from the checkout."""
    folder = tmp_path_factory.mktemp("site")
    install = ["install", "--quiet", "--no-deps", "--no-compile", "--no-index", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *install, str(wheel)], check=True)
    return folder


def modules() -> set[str]:
    """Every source file of the checkout by its place in the package."""
    found = {path.relative_to(ROOT) for name in SOURCES for path in (ROOT / name).rglob("*.py")}
    inside = {path.as_posix() for path in found}
    return {name if name.startswith("qconvert/") else f"qconvert/{name}" for name in inside}


def run_outside(site: Path, *args: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *args], cwd=site, env=env, capture_output=True, text=True, check=False
    )


def test_the_wheel_has_one_top_level_name_and_every_module_once(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert max(Counter(names).values()) == 1
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2 and "qconvert" in tops
    assert (tops - {"qconvert"}).pop().endswith(".dist-info")
    assert {name for name in names if name.endswith(".py")} == modules()
    assert set(names) >= DATA


def test_the_embedded_model_travels(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        sizes = {
            Path(i.filename).name: i.file_size for i in archive.infolist() if "/demo/model/" in i.filename
        }
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(sizes)
    assert sum(sizes.values()) <= 10_000_000


def test_the_sdist_holds_each_file_once(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = [member for member in archive.getmembers() if not member.isdir()]
    assert not [member.name for member in files if not member.isfile()], "links break on some systems"
    names = [member.name.split("/", 1)[1] for member in files]
    assert max(Counter(names).values()) == 1
    held = Counter(name if name.startswith("qconvert/") else f"qconvert/{name}" for name in names)
    assert {name for name in held if held[name] > 1} == set()
    assert set(held) >= modules() | DATA
    assert {"pyproject.toml", "README.md", "LICENSE"} <= set(names)


def test_it_runs_where_it_is_installed(site: Path) -> None:
    ran = run_outside(site, "-m", "qconvert", "--help")
    assert ran.returncode == 0 and "quantize" in ran.stdout, ran.stderr
    for name in ("formats.huggingface.folder", "evaluate.perplexity_report"):
        ran = run_outside(site, "-c", f"import qconvert.{name} as module; print(module.__file__)")
        assert Path(ran.stdout.strip()).is_relative_to(site), ran.stderr
    for name in ("formats", "evals"):
        assert "ModuleNotFoundError" in run_outside(site, "-c", f"import {name}").stderr


def test_every_module_imports_where_it_is_installed(site: Path) -> None:
    names = sorted(name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in modules())
    names = [name for name in names if not name.endswith("__main__")]
    ran = run_outside(site, "-c", f"import importlib\nfor n in {names!r}: importlib.import_module(n)")
    assert ran.returncode == 0, ran.stderr


def test_the_console_script_is_installed_and_tells_the_version(site: Path) -> None:
    import qconvert

    assert (site / "bin" / "qconvert").is_file()
    assert run_outside(site, "-m", "qconvert", "--version").stdout.split()[-1] == qconvert.__version__
