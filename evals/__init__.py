"""Measures what quantization costs in quality, and what conversion costs in time."""
