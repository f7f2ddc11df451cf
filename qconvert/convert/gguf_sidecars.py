"""Writes what people put beside a GGUF: a model card, a Modelfile for Ollama, a manifest."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.core.version import __version__
from qconvert.errors import TAKEN, OutputExists
from qconvert.formats.huggingface.model_card_header import read_front_matter

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.models.parameter_table import ParameterTable

CARD, MODELFILE, MANIFEST = ".md", ".Modelfile", ".qconvert.json"
# Of the source's card; the others tell of its files.
_KEPT_KEYS = ("license", "license_name", "license_link", "language", "base_model", "pipeline_tag")


def sidecar(path: Path, suffix: str) -> Path:
    """The file beside `NAME.gguf` with this suffix; numbered parts share one."""
    stem = path.name.removesuffix(".gguf").partition("-00001-of-")[0]
    return path.with_name(stem + suffix)


def check_sidecars(path: Path, suffixes: tuple[str, ...], *, overwrite: bool) -> None:
    """Raise OutputExists where one is there and may not be replaced."""
    for suffix in suffixes:
        beside = sidecar(path, suffix)
        if beside.exists() and not overwrite:
            raise OutputExists(f"{beside}: already exists", TAKEN)


def modelfile(path: Path, source: Checkpoint) -> str:
    """The Modelfile that `ollama create` needs: with the source's chat template where that is plain.

    Ollama takes parameters from the GGUF, and templates that it knows.
    """
    from qconvert.convert.ollama_template import turns_of

    turns = turns_of(source)
    return f"FROM ./{path.name}\n" + (turns.modelfile() if turns else "")


def ollama_create(path: Path) -> str:
    """The command that gives a GGUF to Ollama, by the Modelfile beside it."""
    stem = sidecar(path, "")
    return f"ollama create {shlex.quote(stem.name.lower())} -f {shlex.quote(str(sidecar(path, MODELFILE)))}"


def card(path: Path, table: ParameterTable, source: Checkpoint, name: str, *, modelfile: bool = False) -> str:
    """The card of a GGUF as Markdown: front matter of the source's card, its tensors, how to run it.

    `modelfile` says that a Modelfile lies beside it.
    """
    import yaml

    from qconvert.report.tables import parameter_table_lines

    said = read_front_matter(source.path) if source.path.is_dir() else {}
    kept = {key: said[key] for key in _KEPT_KEYS if key in said}
    header = {**kept, "tags": ["gguf", "qconvert"]}
    return "\n".join(
        [
            "---",
            yaml.safe_dump(header, sort_keys=False, allow_unicode=True).rstrip(),
            "---",
            f"# {path.stem}",
            "",
            f"Made from `{name}` with qconvert {__version__}.",
            "",
            "```",
            *parameter_table_lines(table),
            "```",
            "",
            "## Running",
            "",
            "```sh",
            f"llama-server -m {path.name}",
            ollama_create(Path(path.name))
            if modelfile
            else f"echo 'FROM ./{path.name}' > Modelfile && ollama create {path.stem.lower()} -f Modelfile",
            "```",
            "",
        ]
    )
