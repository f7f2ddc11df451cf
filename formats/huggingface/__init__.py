"""Reads and plans Hugging Face folders: safetensors files, their index, and the files next to them."""
