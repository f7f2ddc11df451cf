"""Finds the Python files and module folders that a model brings: read as text to know their names, never run.

Sources: `auto_map` in config.json and beside it names modules as `module.Class` (transformers'
`dynamic_module_utils.py`, which follows relative imports from there); `modules.json` of sentence-transformers
names folders.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.huggingface.shard_index import stays_inside
from qconvert.formats.io.strict_json import parse_json_object, read_bounded

# The files in which transformers looks for `auto_map`.
_NAMING = (
    "config.json", "tokenizer_config.json", "processor_config.json", "preprocessor_config.json",
    "image_processor_config.json", "video_preprocessor_config.json", "generation_config.json",
)  # fmt: skip
# Names that modules of a model have by custom, for loaders that find them otherwise.
_CUSTOM = re.compile(
    r"(modeling|configuration|tokenization|processing|image_processing|video_processing|feature_extraction)_"
    r"\w+\.py"
)
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+\.(\w+)[ \t]+import|from[ \t]+\.[ \t]+import[ \t]+([\w, \t]+))", re.M
)
MODULES_FILE = "modules.json"
_MODULE_SUFFIXES = (".json", ".txt", ".model", ".safetensors")
_MAX_BYTES, _MAX_JSON, _MOST_FILES = 16 << 20, 32 << 20, 256


def code_files(folder: Path) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Returns the model's own Python files in its folder, sorted, and named ones that are not there."""
    named = named_code(folder)
    found, missing, queue = dict[str, Path](), [], sorted(named)
    custom = (entry.name for entry in folder.iterdir() if _CUSTOM.fullmatch(entry.name))
    queue += sorted(set(custom) - set(queue))
    while queue:
        name = queue.pop(0)
        path = folder / name
        if name in found or len(found) >= _MOST_FILES:
            continue
        if not path.is_file():
            missing += [name] if name in named else []
            continue
        found[name] = path
        queue += sorted(_imports(path))
    return tuple(found[name] for name in sorted(found)), tuple(missing)


def named_code(folder: Path) -> frozenset[str]:
    """Returns the names of the Python files that `auto_map` says are in the folder."""
    return frozenset(name for file in _NAMING for name in _mapped(folder / file))


def module_folders(folder: Path) -> tuple[Path, ...]:
    """Returns the folders that modules.json names, which lie beside it; () where there is no such file."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return ()
    try:
        modules = parse_json_object(b'{"modules":' + read_bounded(path, 1 << 20) + b"}", path.name)["modules"]
    except CorruptCheckpoint:  # `read_pooling` refuses it, where pooling is needed
        return ()
    listed = modules if isinstance(modules, list) else []
    names = [str(module.get("path")) for module in listed if isinstance(module, dict)]
    return tuple(folder / name for name in dict.fromkeys(names) if stays_inside(name))


def module_files(folder: Path) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Returns the files in those folders that are copied, and those that are left out, such as pickles."""
    entries = [entry for each in module_folders(folder) if each.is_dir() for entry in sorted(each.iterdir())]
    copied = [entry for entry in entries if entry.suffix in _MODULE_SUFFIXES and entry.is_file()]
    return tuple(copied), tuple(entry for entry in entries if entry not in copied)


def _mapped(path: Path) -> Iterator[str]:
    """Yields the files that one JSON file's `auto_map` names; those of other repositories are not ours."""
    if not path.is_file():
        return
    try:
        raw = read_bounded(path, _MAX_JSON)
        mapping = parse_json_object(raw, path.name).get("auto_map") if b"auto_map" in raw else None
    except CorruptCheckpoint:  # the reader of the file's content refuses it
        return
    for value in mapping.values() if isinstance(mapping, dict) else ():
        for reference in value if isinstance(value, list) else [value]:
            if isinstance(reference, str) and "--" not in reference and reference.count(".") == 1:
                name = f"{reference.split('.')[0]}.py"
                if stays_inside(name):
                    yield name


def _imports(path: Path) -> set[str]:
    """The files beside it that a module imports."""
    if path.stat().st_size > _MAX_BYTES:
        return set()
    text = path.read_bytes().decode("utf-8", "replace")
    found = set[str]()
    for module, several in _IMPORT.findall(text):
        found.update([module] if module else re.findall(r"\w+", several.split(" as ")[0]))
    return {f"{name}.py" for name in found}
