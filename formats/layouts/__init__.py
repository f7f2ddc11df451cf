"""How quantized tensors are spelled as named arrays, one module per on-disk layout."""
