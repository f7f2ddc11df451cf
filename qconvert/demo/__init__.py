"""Holds the embedded model and the text that the demonstration evaluates it on."""

from pathlib import Path
from typing import Final

MODEL_DIR: Final = Path(__file__).parent / "model"
"""Folder of the embedded checkpoint, in the Hugging Face layout. It is read from disk like any other
checkpoint, so the package must be installed as files (wheels always are), not imported from a zip."""
