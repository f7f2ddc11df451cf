"""Says which version of qconvert this is."""

__version__ = "0.1.0"
