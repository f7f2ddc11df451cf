"""Stores the scores of an unfinished evaluation, so that the evaluation can go on where it stopped.

The file belongs to one evaluation: the same models, text, tokenizer, protocol and arithmetic, told by
a fingerprint. Plain numpy arrays, read without unpickling.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from qconvert.errors import BadRecipe
from qconvert.formats.io.local_file import write_whole
from qconvert.formats.io.output_folder import MANIFEST_FILE

if TYPE_CHECKING:
    from qconvert.evaluate.lockstep import Track

_KINDS = ("nll", "top", "kl")


def fingerprint(tracks: Sequence[Track], *conditions: str) -> str:
    """Hash the conditions of an evaluation.

    Files of weights are told apart by size and time, to the nanosecond: two quantizations of one model are
    equal in everything that a header holds.
    """
    models = []
    for track in tracks:
        model, path = track.model, track.model.path
        names = () if path is None else (path,) if path.is_file() else path.iterdir()
        held = sorted(p for p in names if p.suffix in (".safetensors", ".gguf") or p.name == MANIFEST_FILE)
        files = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in held]
        models.append([model.label, model.size_bytes, str(model.decoder.dtype), track.echo, files])
    return hashlib.sha256(json.dumps([models, conditions]).encode()).hexdigest()


def save_scores(path: Path, tracks: Sequence[Track], done: int, mark: str) -> None:
    """Write the scores of the first `done` windows, all of them or none."""
    arrays: dict[str, np.ndarray] = {"done": np.array(done), "mark": np.array(mark)}
    for i, track in enumerate(tracks):
        arrays[f"{i}.clock"] = np.array([track.seconds, track.tokens])
        for kind in _KINDS:
            arrays[f"{i}.{kind}"] = np.concatenate([np.empty(0), *getattr(track, kind)])
    packed = io.BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]
    write_whole(path, packed.getvalue())


def load_scores(path: Path, tracks: Sequence[Track], mark: str) -> int:
    """Fill the tracks with the scores in the file; returns the number of windows they cover.

    That is 0 where there is no file. Raises BadRecipe for one of another evaluation.
    """
    if not path.exists():
        return 0
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if str(arrays["mark"]) != mark:
                raise BadRecipe(
                    f"{path}: scores of other models, another text, or another protocol",
                    "leave out --resume, or repeat the command that was interrupted",
                )
            for i, track in enumerate(tracks):
                track.seconds, track.tokens = float(arrays[f"{i}.clock"][0]), int(arrays[f"{i}.clock"][1])
                for kind in _KINDS:
                    scores = arrays[f"{i}.{kind}"]
                    getattr(track, kind).append(scores.astype(np.int64) if kind == "top" else scores)
            return int(arrays["done"])
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BadRecipe(f"{path}: no scores to resume from", "leave out --resume") from error
