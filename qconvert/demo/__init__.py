"""The embedded model, the text it is evaluated on, and the demonstration that uses both."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final = Path(__file__).parent / "model"
"""Folder of the embedded checkpoint, in the Hugging Face layout. It is read from disk like any other
checkpoint, so the package must be installed as files (wheels always are), not imported from a zip."""
