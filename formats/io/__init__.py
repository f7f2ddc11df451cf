"""Reads and writes bytes: bounded files, strict JSON, files laid out in advance, whole folders."""
