"""Bytes: readers, writers and layouts of checkpoint files."""
