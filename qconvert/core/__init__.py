"""Defines the words that every folder uses: dtypes, encodings, values, protocols, schemes, GGML types."""
