"""Declares models as GGUF files hold them: keys, tensor names, identity, and the way back to a config."""
