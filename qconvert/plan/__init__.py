"""Turns a request and the names of a model into a plan; opens no file and holds no weight."""
