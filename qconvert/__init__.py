"""qconvert: any language-model checkpoint in, any quantized checkpoint out."""

__version__ = "0.1.0"
