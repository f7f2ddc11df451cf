"""Chooses which files next to the weights are copied to the output.

Known names are copied, and the code and the modules that the model's own configs name; everything else is
left out and listed, so that nothing is dropped silently and nothing unexpected (scripts, pickles, other
weights) is carried along.
"""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase
from pathlib import Path

from qconvert.core.protocols import Sidecars
from qconvert.formats.huggingface.own_code import code_files, module_files, module_folders
from qconvert.formats.io import limits

# Compared in lower case. quantize_config.json is missing on purpose: it describes the weights that were read,
# not those that will be written.
_OF_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken",
    "spiece.model", "sentencepiece*.model", "chat_template.*",
)  # fmt: skip
_COPIED = (
    *_OF_TOKENIZER, "generation_config.json", "*processor_config.json", "modules.json",
    "config_sentence_transformers.json", "sentence_*_config.json", "license*", "licence*", "notice*",
    "use_policy*",
)  # fmt: skip
_NEVER_COPIED = (".py", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".safetensors")


def sidecars_of(folder: Path, read: Container[str]) -> Sidecars:
    """Returns the entries of a folder that are not in `read`, sorted by name into copied and skipped."""
    entries = sorted(entry for entry in folder.iterdir() if entry.name not in read)

    def is_copied(entry: Path) -> bool:
        name = entry.name.lower()
        known = any(fnmatchcase(name, pattern) for pattern in _COPIED)
        return known and not name.endswith(_NEVER_COPIED) and _is_modest(entry)

    (code, missing), (modules, left) = code_files(folder), module_files(folder)
    copied = tuple(entry for entry in entries if entry in code or is_copied(entry))
    folders = module_folders(folder) if modules else ()
    skipped = tuple(entry for entry in entries if entry not in copied and entry not in folders)
    return Sidecars((*copied, *modules), (*skipped, *left), code=code, missing=missing)


def is_of_tokenizer(name: str) -> bool:
    """Returns whether a file of this name is a part of a tokenizer, or its chat template."""
    return any(fnmatchcase(name.lower(), pattern) for pattern in _OF_TOKENIZER)


def _is_modest(entry: Path) -> bool:
    """Whether it is a file that can be copied; a sparse one can claim more than any disk holds."""
    return entry.is_file() and entry.stat().st_size <= limits.SIDECAR_BYTES
