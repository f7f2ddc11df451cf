"""Reads and plans Hugging Face folders: safetensors files, their index, and what lies beside them."""
