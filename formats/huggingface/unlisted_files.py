"""Finds the files that hold the weights of a folder with neither model.safetensors nor an index.

mlx-lm (`model*.safetensors`) and vLLM (`*.safetensors`) read such folders. Files are taken where their names
leave no doubt: all shards of one model, or the only one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from qconvert.errors import CorruptCheckpoint, shown

SUFFIX = ".safetensors"
# Mistral's programs name weights in their own way, in files beside those of transformers.
OWN_LAYOUT = "consolidated"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors")
_NO_MODEL = re.compile(r"(optimizer|scheduler|adapter|lora|training|random)\w*\b.*")


def files_without_index(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the files of one model among the names of a folder, in order; () where they do not say it.

    Raises CorruptCheckpoint for shards of which some are missing.
    """
    files = [n for n in names if n.endswith(SUFFIX) and not n.startswith(OWN_LAYOUT)]
    files = [n for n in files if not _NO_MODEL.fullmatch(n)]
    shards = [match for match in map(_SHARD.fullmatch, files) if match]
    if len(shards) != len(files) or len({(m["stem"], m["count"]) for m in shards}) > 1:
        return tuple(files) if len(files) == 1 else ()
    if not shards:
        return ()
    promised, numbers = int(shards[0]["count"]), {int(m["number"]) for m in shards}
    if len(numbers) == promised and numbers == set(range(1, promised + 1)):
        return tuple(sorted(files))
    stem, width = shards[0]["stem"], len(shards[0]["count"])
    missing = next((n for n in range(1, promised + 1) if n not in numbers), promised)
    name = f"{stem}-{missing:0{width}d}-of-{shards[0]['count']}{SUFFIX}"
    raise CorruptCheckpoint(
        f"{shown(files[0])}: {len(numbers)} of its {promised} shards are here; the first that is missing is "
        f"{shown(name)}",
        "the download is incomplete; run it again",
    )
