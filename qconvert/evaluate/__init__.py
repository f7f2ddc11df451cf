"""Measures what quantization costs in quality: perplexity, KL divergence and their statistics."""
