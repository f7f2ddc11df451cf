"""Measures, or reads, statistics of the inputs of a model's linears, by role, layer and expert."""
