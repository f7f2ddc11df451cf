"""Chooses which files next to the weights are copied to the output.

Known names are copied, everything else is left out and listed, so that nothing is dropped silently and
nothing unexpected (code, pickles, other weights) is carried along.
"""

from __future__ import annotations

from collections.abc import Container
from fnmatch import fnmatchcase
from pathlib import Path

from qconvert.core.protocols import Sidecars

# Compared in lower case. quantize_config.json is missing on purpose: it describes the weights that were read,
# not those that will be written.
_COPIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model*", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt", "tekken.json", "*.tiktoken",
    "spiece.model", "sentencepiece*.model", "chat_template.*", "generation_config.json",
    "*processor_config.json", "license*", "licence*", "notice*", "use_policy*",
)  # fmt: skip
_NEVER_COPIED = (".py", ".bin", ".pt", ".pth", ".pkl", ".ckpt", ".gguf", ".safetensors")


def sidecars_of(folder: Path, read: Container[str]) -> Sidecars:
    """Returns the entries of a folder that are not in `read`, sorted by name into copied and skipped."""
    entries = sorted(entry for entry in folder.iterdir() if entry.name not in read)

    def is_copied(entry: Path) -> bool:
        name = entry.name.lower()
        known = any(fnmatchcase(name, pattern) for pattern in _COPIED)
        return known and not name.endswith(_NEVER_COPIED) and entry.is_file()

    copied = tuple(filter(is_copied, entries))
    return Sidecars(copied, tuple(entry for entry in entries if entry not in copied))
