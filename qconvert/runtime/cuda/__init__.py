"""Decodes on NVIDIA GPUs with kernels written in Triton, which is optional."""
