"""Runs checkpoints in a built-in decoder, for evals, calibration and generation."""
