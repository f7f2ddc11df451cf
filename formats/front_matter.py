"""The YAML block at the top of a model card (README.md): who made a model, under which licence.

Nothing depends on it but labels, so whatever cannot be read counts as not said.
"""

from __future__ import annotations

from pathlib import Path

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.json_io import read_bounded
from qconvert.tensors import Json

MAX_CARD_BYTES = 4 << 20


def read_front_matter(folder: Path) -> Json:
    """The front matter of a folder's README.md: texts and lists of texts, {} when there is none.

    Every scalar is read as text, so that the language `no` is Norwegian and the version 1.0 stays 1.0.
    """
    import yaml

    path = folder / "README.md"
    if not path.is_file():
        return {}
    try:
        lines = read_bounded(path, MAX_CARD_BYTES).decode("utf-8").splitlines()
        if not lines or lines[0] != "---" or "---" not in lines[1:]:
            return {}
        block = "\n".join(lines[1 : lines.index("---", 1)]).replace("\t", "  ")
        data = yaml.load(block, yaml.BaseLoader)  # makes only texts, lists and mappings
    except (CorruptCheckpoint, ValueError, yaml.YAMLError, RecursionError):
        return {}
    found = {key: _texts(value) for key, value in data.items()} if isinstance(data, dict) else {}
    return {key: value for key, value in found.items() if isinstance(key, str) and value}


def _texts(value: object) -> str | list[str] | None:
    """A text, or the texts of a list; None for anything else, and for what YAML calls null."""
    if isinstance(value, list):
        return [text for entry in value if isinstance(text := _texts(entry), str)]
    return value if isinstance(value, str) and value not in ("", "~", "null") else None
