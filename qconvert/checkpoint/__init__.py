"""Opens checkpoints: files, layout and names together are a model that can be read."""
