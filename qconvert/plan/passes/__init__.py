"""Holds the passes of the compiler, one file each."""
