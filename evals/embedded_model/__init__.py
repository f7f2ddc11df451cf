"""Trains the model that comes with qconvert."""
