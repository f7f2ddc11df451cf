"""Opens the tokenizer and the chat template of a checkpoint, be they files or keys of a GGUF."""

from __future__ import annotations

from qconvert.checkpoint.open import Checkpoint
from qconvert.formats.tokenizers.prompts import Dialogue, open_dialogue, open_made_dialogue


def dialogue_of(checkpoint: Checkpoint) -> Dialogue:
    """The tokenizer of a checkpoint. Raises UnsupportedModel where it has none that is read here."""
    made = checkpoint.files.sidecars.made  # by a GGUF file, which has no folder of its own
    if made:
        return open_made_dialogue(made, checkpoint.config, checkpoint.path)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    return open_dialogue(folder, checkpoint.config)
