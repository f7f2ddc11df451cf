"""Reads what a model's pictures become before its vision tower sees them."""

from __future__ import annotations

from pathlib import Path

from qconvert.core.dtypes import Json
from qconvert.formats.io.strict_json import read_json_object

# The files, of which the later counts, and the object in which some have the settings of pictures.
_FILES = (("preprocessor_config.json", "media_proc_cfg"), ("processor_config.json", "image_processor"))


def read_preprocessor(folder: Path) -> Json:
    """Returns the settings of a folder's image processor, {} for a folder without one."""
    found: Json = {}
    for name, inner in _FILES:
        if (folder / name).is_file():
            stated = read_json_object(folder / name)
            pictures = stated.get(inner)
            found = {**found, **stated, **(pictures if isinstance(pictures, dict) else {})}
    return found
