"""Opens whatever statistics a user has: those of `qconvert calibrate`, or an importance matrix."""

from __future__ import annotations

from pathlib import Path

from qconvert.calibrate.imatrix import open_imatrix
from qconvert.calibrate.statistics_file import check_model, read_statistics
from qconvert.core.statistics import StatisticsSource
from qconvert.models import Architecture


def open_statistics(path: Path, architecture: Architecture) -> StatisticsSource:
    """The statistics in a file or folder of `qconvert calibrate`, or in llama.cpp's GGUF or .dat.

    Raises CorruptCheckpoint for a damaged file, BadRecipe for statistics of another model, UnsupportedModel
    for an importance matrix of a family without GGUF names.
    """
    if path.is_dir() or path.suffix == ".safetensors":
        stored = read_statistics(path)
        check_model(stored, architecture)
        return stored
    return open_imatrix(path, architecture)
