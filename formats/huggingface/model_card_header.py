"""Reads the YAML block at the top of a model card (README.md): authors, licence, languages.

Only labels depend on it, so whatever cannot be read counts as absent.
"""

from __future__ import annotations

from pathlib import Path

from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.io.strict_json import read_bounded

MAX_CARD_BYTES = 4 << 20
MAX_BLOCK_BYTES = 256 << 10  # cards that list the results of every benchmark have some 100 kB
# The parser scans all open brackets for every token; cards have one, for a list of tags or languages.
MAX_BRACKETS = 1000


def read_front_matter(folder: Path) -> Json:
    """Returns the front matter of a folder's README.md: texts and lists of texts, {} when there is none.

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
        if len(block) > MAX_BLOCK_BYTES or block.count("[") + block.count("{") > MAX_BRACKETS:
            return {}
        # Creates only texts, lists and mappings. (The faster CBaseLoader crashes on 100,000 open brackets.)
        data = yaml.load(block, yaml.BaseLoader)
    except (CorruptCheckpoint, ValueError, yaml.YAMLError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    # Aliases make one list the value of many keys: check it once.
    lists = {id(value): value for value in data.values() if isinstance(value, list)}
    texts = {number: [entry for entry in value if _is_text(entry)] for number, value in lists.items()}
    found = {key: texts.get(id(value), value) for key, value in data.items() if isinstance(key, str)}
    return {
        key: value for key, value in found.items() if _is_text(value) or (isinstance(value, list) and value)
    }


def _is_text(value: object) -> bool:
    """True if a value is a text that YAML does not read as null."""
    return isinstance(value, str) and value not in ("", "~", "null")
