"""Numbers: the built-in decoder that runs checkpoints for evals and generation."""
