"""Joins the texts of an adapter and its base: config, tokenizer and licence of the merged model."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from qconvert.formats.huggingface.adapter import ADAPTER_CONFIG, WEIGHTS, config_path
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE
from qconvert.formats.huggingface.sidecars import is_of_tokenizer
from qconvert.formats.io.output_folder import MANIFEST_FILE

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@lru_cache(maxsize=1024)
def texts_of(base: Path, adapter: Path, name: str) -> Path:
    """A folder, called `name`, of links to the base's texts, and to the adapter's tokenizer where it has one.

    It is removed when the process ends. Weights are left out: a model that is opened there by its path alone
    would be the base.
    """
    parent = Path(tempfile.mkdtemp(prefix="qconvert-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folder = parent / name
    folder.mkdir()
    base = base if base.is_dir() else base.parent
    own = [entry for entry in config_path(adapter).parent.iterdir() if is_of_tokenizer(entry.name)]
    # Tokenizers are taken whole: a template of the base beside the adapter's would win over it.
    theirs = [entry for entry in base.iterdir() if not (own and is_of_tokenizer(entry.name))]
    left_out = {ADAPTER_CONFIG, *WEIGHTS, INDEX_FILE, MANIFEST_FILE}
    for entry in (*theirs, *own):
        if entry.name not in left_out and entry.suffix not in _WEIGHTS:
            (folder / entry.name).symlink_to(entry.resolve())
    return folder
