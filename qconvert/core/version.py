"""Holds the version of qconvert."""

__version__ = "0.1.0"
NUMERICS = 1
"""Goes up whenever any byte of an output may change: a run is not resumed under another number."""
