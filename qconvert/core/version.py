"""Says which version of qconvert this is."""

__version__ = "0.1.0"
NUMERICS = 1
"""Goes up whenever any byte of an output may change: a run does not go on with one of another number."""
