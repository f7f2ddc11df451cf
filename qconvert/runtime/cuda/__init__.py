"""Numbers: the decoder's kernels for NVIDIA GPUs, written in triton, which is optional."""
