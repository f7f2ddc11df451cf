"""Stores quantized tensors as named arrays: one module, or folder, for each layout on disk."""
