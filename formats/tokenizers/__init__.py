"""Reads tokenizers of every kind, and converts them between Hugging Face files and GGUF keys."""
