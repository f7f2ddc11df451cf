"""Chooses names, row orders and types of the tensors of a GGUF file."""
