"""From a checkpoint to GGUF files: element types and mixes, forms, units, the draft, carrying it out."""
