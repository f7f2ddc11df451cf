"""GGUF's words for a model: its keys, the names of its tensors, what it is called, and the way back."""
