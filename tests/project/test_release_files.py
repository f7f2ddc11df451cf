"""The files beside the code that say again what the package says: they agree with it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from qconvert.core.version import __version__

ROOT = Path(__file__).resolve().parents[2]


def setting(name: str) -> str:
    """A text of [project] in pyproject.toml, which Python 3.10 has no reader for."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^{name} = "(.*)"$', text, re.MULTILINE)
    assert found, name
    return found[1]


@pytest.fixture(scope="module")
def citation() -> Any:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version(citation: Any) -> None:
    assert 'version = { attr = "qconvert.core.version.__version__" }' in (ROOT / "pyproject.toml").read_text()
    assert citation["version"] == __version__
    assert citation["title"] == setting("name") and citation["abstract"] == setting("description")
    assert citation["license"] == setting("license")


def test_the_citation_has_what_its_format_requires(citation: Any) -> None:
    """Citation File Format 1.2.0: required keys, and the kinds of their values."""
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    assert all(isinstance(citation[key], str) for key in ("message", "title", "version", "license"))
    assert citation["authors"] and all(author["name"] for author in citation["authors"])


def instructions() -> list[list[str]]:
    """The instructions of the Dockerfile, as words."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    return [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_the_docker_image_is_built_of_files_that_are_there() -> None:
    copied = [shlex.split(rest)[:-1] for name, rest in instructions() if name == "COPY"]
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for path in (path for paths in copied for path in paths):
        assert (ROOT / path).exists() and f"!{path}" in ignored
    packages = {"qconvert", "formats"}
    assert packages <= {path for paths in copied for path in paths}


def test_the_docker_image_runs_the_demo_on_a_python_that_is_supported() -> None:
    last = dict(instructions())
    assert (last["ENTRYPOINT"], last["CMD"]) == ('["qconvert"]', '["demo"]')
    python = re.fullmatch(r"python:3\.(\d+)-slim", last["FROM"])
    least = re.fullmatch(r">=3\.(\d+)", setting("requires-python"))
    assert python and least and int(python[1]) >= int(least[1])
    constraints = [rest for name, rest in instructions() if name == "RUN" and "pip install" in rest]
    assert len(constraints) == 2 and all("-c .ci/constraints.txt" in line for line in constraints)
    assert "download.pytorch.org/whl/cpu" in constraints[0]
