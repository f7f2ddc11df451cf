"""Computes on arrays: quantization, scale search, packing, transcoding. Knows no names and no paths."""
