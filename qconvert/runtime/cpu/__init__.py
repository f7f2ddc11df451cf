"""Kernels of the CPU: products with packed weights, and a whole decode step as one compiled call."""
