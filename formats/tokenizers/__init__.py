"""Reads tokenizers of every kind, and writes each as the other container has it."""
