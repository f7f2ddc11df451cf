"""Multiplies by packed weights on the CPU, and runs a whole decode step as one compiled call."""
