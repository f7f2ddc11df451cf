"""The table of limits that every reader of untrusted files applies.

Each is some times what the largest model in use needs, and small enough that a file within all of them is
read or refused within 5 seconds and 500 MB beyond what its own weights take. Work is bounded by bytes and by
numbers of records, never by a shape: a shape costs nothing to write.
"""

from __future__ import annotations

# --- JSON of any kind: what a parsed value takes is up to 240 bytes for each key and for each bracket.
CONFIG_BYTES = 16 << 20
JSON_KEYS = 1_200_000  # an index of Kimi-K3 has 497,220, a header of 131,072 tensors four for each
JSON_BRACKETS = 1_600_000  # a tokenizer with 514,000 merges has one for each
JSON_COMMAS = 4_000_000  # and two of these, and one for each of 262,144 tokens

# --- safetensors
SAFETENSORS_HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE in the reference implementation
INDEX_BYTES = 512 << 20  # Kimi-K3 as GPTQ has 989,184 arrays, and an index of 112 MB
SAFETENSORS_TENSORS = 1 << 17  # of one file; Kimi-K3, the largest in use, has 497,220 in 96 files
STATISTICS_TENSORS = 1 << 18  # of a file of ours that is read as a whole, with four keys for each
METADATA_KEYS = 1 << 16
# Elements of a tensor without bytes, if its zero were one: so a loop over its rows is short.
EMPTY_ELEMENTS = 1 << 24

# --- GGUF
GGUF_HEADER_BYTES = 128 << 20  # the largest vocabularies in use need 16 MB
GGUF_ARRAY_ITEMS = 4 << 20  # and 1.3 million items
GGUF_RECORDS = 1 << 16  # of tensors; 235B parameters are 1,131
GGUF_KEYS = 1 << 12  # a file in use has 40
GGUF_KEY_BYTES = 1 << 10
GGUF_TEXT_BYTES = 16 << 20  # of one text; the longest are chat templates, of some 100 kB

# --- tokenizers
TOKENIZER_BYTES = 128 << 20  # gemma's, the largest in use, has 34 MB

# --- others
IMATRIX_BYTES = 2 << 30  # of float32 sums; a model of 10^12 parameters in experts has 1.5 GB
IMATRIX_ENTRY_VALUES = 1 << 25  # 384 experts of 7,168 columns are 2.8 million
SIDECAR_BYTES = 256 << 20  # of a file that is copied as it is
JOURNAL_BYTES = 256 << 20  # 100 bytes for each block of 16 MB; one of 700 GB has 5 MB
MANIFEST_BYTES, MANIFEST_BYTES_OF_TENSOR = 1 << 20, 4 << 10  # one of ours has 600 to 1,200 for each


def manifest_values(tensors: int) -> int:
    """How many times the values of other JSON such a record can have: some fifteen keys for each tensor."""
    return 1 + tensors // 50_000


def manifest_bytes(tensors: int) -> int:
    """The most bytes that the record of a model of so many tensors can have."""
    return MANIFEST_BYTES + MANIFEST_BYTES_OF_TENSOR * tensors
