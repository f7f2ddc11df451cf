"""Measures the decoder on an NVIDIA GPU: one run, in sections that are processes of their own."""
