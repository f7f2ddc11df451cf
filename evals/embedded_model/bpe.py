"""Trains the embedded model's tokenizer: a byte-level BPE built like Qwen's, of 4,096 tokens.

The normalizer, the splitting expression, the byte alphabet and the place of the special tokens (after the
vocabulary) are Qwen2's, so that whatever reads a Qwen tokenizer reads this one, and its GGUF pre-tokenizer
is "qwen2". Only the merges are ours.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE: Final = 4096
END_OF_TEXT: Final = "<|endoftext|>"
SPECIALS: Final = (END_OF_TEXT, "<|im_start|>", "<|im_end|>")
END_OF_TEXT_ID: Final = VOCAB_SIZE - len(SPECIALS)

# From Qwen2's tokenizer.json: contractions, words with their leading blank, single digits, runs of signs
# with the line ends behind them, line ends with the blanks before them, other blanks.
_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(documents: Iterable[str]) -> Tokenizer:
    """Learn the merges from `documents`; the special tokens take the last ids, `END_OF_TEXT_ID` first."""
    tokenizer = Tokenizer(BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel(
        add_prefix_space=False, trim_offsets=False, use_regex=False
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=END_OF_TEXT_ID,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json as `AutoTokenizer` expects them for Qwen2 and Qwen3."""
    tokenizer.save(str(folder / "tokenizer.json"))
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    config = {
        "add_bos_token": False,
        "add_prefix_space": False,
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {"content": token, **flags} for token in SPECIALS
        },
        "additional_special_tokens": list(SPECIALS[1:]),
        "bos_token": None,
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "errors": "replace",
        "model_max_length": context_length,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
