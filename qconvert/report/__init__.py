"""Prints tables, pages and pictures."""
