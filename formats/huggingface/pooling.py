"""Reads how a sentence-transformers folder pools token embeddings into one.

Source: `modules.json` and the Pooling module's `config.json` in sentence-transformers; the numbers are those
of llama_pooling_type in llama.h.
"""

from __future__ import annotations

from pathlib import Path

from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.huggingface.shard_index import stays_inside
from qconvert.formats.io.strict_json import parse_json_object, read_bounded, read_json_object

MAX_BYTES = 1 << 20
_MODES = {"pooling_mode_mean_tokens": 1, "pooling_mode_cls_token": 2, "pooling_mode_lasttoken": 3}


def read_pooling(folder: Path) -> int | None:
    """Returns GGUF's number of the folder's pooling, None where it has no pooling module.

    Raises UnsupportedModel for a pooling that llama.cpp does not have.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    listed = parse_json_object(b'{"modules":' + read_bounded(path, MAX_BYTES) + b"}", path.name)
    modules = listed["modules"] if isinstance(listed["modules"], list) else []
    kinds = [m for m in modules if isinstance(m, dict) and str(m.get("type")).endswith(".Pooling")]
    name = kinds[0].get("path", "") if kinds else None
    if name is None:
        return None
    if name and not stays_inside(name):
        raise CorruptCheckpoint(
            f"modules.json: its pooling is in {shown(name)}, not in a folder beside it",
            "a path that points elsewhere is not followed; get the checkpoint from its source again",
        )
    config = folder / name / "config.json"
    if not config.is_file():
        return None
    modes = [mode for mode, chosen in read_json_object(config, MAX_BYTES).items() if chosen is True]
    for mode in modes:
        if mode in _MODES:
            return _MODES[mode]
    said = ", ".join(map(shown, modes)) or "no mode"
    raise UnsupportedModel(
        f"{shown(name)}/config.json: {said}, a pooling that llama.cpp lacks", f"known: {', '.join(_MODES)}"
    )
