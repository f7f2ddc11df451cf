"""Summarises a model for its user: context, vocabulary, rope, tokenizer, chat template, licence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qconvert.checkpoint.gguf_model import GGUFModel
from qconvert.checkpoint.open import Checkpoint
from qconvert.core.dtypes import Json
from qconvert.errors import CorruptCheckpoint
from qconvert.formats.huggingface.model_card_header import read_front_matter
from qconvert.formats.tokenizers.huggingface_files import read_tokenizer_json

# The names that configs have for the same facts, the usual one first.
_CONTEXT = (
    "max_position_embeddings",
    "n_positions",
    "seq_length",
    "max_seq_len",
    "model_max_length",
    "n_ctx",
)
_TOKENIZER_FILES = {
    "tokenizer.json": "",  # says its kind itself
    "tokenizer.model": "SentencePiece",
    "spiece.model": "SentencePiece",
    "vocab.json": "BPE (vocab.json and merges.txt)",
    "vocab.txt": "WordPiece (vocab.txt)",
    "tokenizer_config.json": "code of its own",
}
_LICENCE_FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md", "LICENCE")


def about(checkpoint: Checkpoint) -> Json:
    """What config, tokenizer files and card say; None where they say nothing.

    `context` is in tokens, `vocabulary` the rows of the embedding, `rope` the base and the kind of scaling.
    """
    config = checkpoint.config
    inner = config.get("text_config")
    text: Json = inner if isinstance(inner, dict) else config
    embed = checkpoint.architecture.table("embed")
    return {
        "context": next((text[name] for name in _CONTEXT if isinstance(text.get(name), int)), None),
        "vocabulary": embed.shape[0] if embed is not None else None,
        "rope": _rope(text),
        **(_of_gguf(checkpoint.files) if isinstance(checkpoint.files, GGUFModel) else _of_folder(checkpoint)),
    }


def metadata(checkpoint: Checkpoint) -> dict[str, Any]:
    """The keys of a GGUF, or of config.json, with their values as they are stored."""
    if isinstance(checkpoint.files, GGUFModel):
        return {key: entry.value for key, entry in checkpoint.files.kv.items()}
    return dict(checkpoint.config)


def _rope(config: Json) -> str | None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters")
    scaling = scaling if isinstance(scaling, dict) else {}
    theta = config.get("rope_theta", scaling.get("rope_theta"))
    if not isinstance(theta, int | float):
        return None
    kind, factor = scaling.get("rope_type", scaling.get("type")), scaling.get("factor")
    scaled = isinstance(kind, str) and kind != "default"
    by = f" by {factor:g}" if isinstance(factor, int | float) else ""
    return f"base {theta:,.0f}{f', {kind} scaling{by}' if scaled else ''}"


def _of_folder(checkpoint: Checkpoint) -> Json:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    card = read_front_matter(folder)
    licence = card.get("license") or next((n for n in _LICENCE_FILES if (folder / n).is_file()), None)
    settings = _json(folder / "tokenizer_config.json")
    template = bool(settings.get("chat_template")) or (folder / "chat_template.jinja").is_file()
    return {"tokenizer": _tokenizer(folder), "chat_template": template, "licence": licence}


def _tokenizer(folder: Path) -> str | None:
    name = next((name for name in _TOKENIZER_FILES if (folder / name).is_file()), None)
    if name != "tokenizer.json":
        return _TOKENIZER_FILES[name] if name else None
    model = _json(folder / name).get("model")
    return str(model.get("type", "tokenizer.json")) if isinstance(model, dict) else "tokenizer.json"


def _of_gguf(file: GGUFModel) -> Json:
    found = {key: entry.value for key, entry in file.kv.items()}
    kind, pre = found.get("tokenizer.ggml.model"), found.get("tokenizer.ggml.pre")
    return {
        "tokenizer": f"{kind}{f', pre-tokenizer {pre}' if pre else ''}" if kind else None,
        "chat_template": "tokenizer.chat_template" in found,
        "licence": found.get("general.license"),
    }


def _json(path: Path) -> Json:
    """The object in a file; empty where there is none, or none that can be read (other commands say why)."""
    try:
        return read_tokenizer_json(path)
    except CorruptCheckpoint:
        return {}
