"""Reads the metadata of a GGUF model file by key name: the input of a declaration's inverse.

Pure. A key that a model needs and the file lacks, or whose value is invalid, is an error that names it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from qconvert.core.config_json import MAX_EXPERTS, MAX_LAYERS
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV, GGUFTensor
from qconvert.core.numbers import positive_number, shortest
from qconvert.errors import CorruptCheckpoint

MAX_COUNT = 1 << 31
# Bounds, checked before anything is expanded by layer or by head.
_MOST = {
    "decoder_block_count": MAX_LAYERS,
    "attention.head_count": 1 << 16,
    "attention.head_count_kv": 1 << 16,
    "ssm.group_count": 1 << 16,
    "ssm.time_step_rank": 1 << 16,
    "expert_count": MAX_EXPERTS,
}


class FindScaling(Protocol):
    """Finds the parameters of Llama 3's scaling for a RoPE base, None if there are none.

    From the first `count` divisors, all where it is None.
    """

    def __call__(self, theta: float, count: int | None = None, /) -> Json | None: ...


def no_numbers(name: str) -> tuple[float, ...]:
    """Returns no numbers: for a file whose tensors are not available."""
    raise CorruptCheckpoint(f"{name}: not there")


@dataclass(frozen=True)
class Metadata:
    """The keys and tensors of a file called `file` in errors, for one architecture of llama.cpp.

    Keys are given without `arch.`. `numbers` reads a small float32 vector by its name, and `scaling` finds
    the parameters that `rope_freqs.weight` was computed from, None in a file without it.
    """

    file: str
    arch: str
    kv: Mapping[str, KV]
    tensors: Mapping[str, GGUFTensor]
    numbers: Callable[[str], tuple[float, ...]] = no_numbers
    scaling: FindScaling | None = None

    @property
    def layers(self) -> int:
        """The number of layers, which must be present; no model has more than `MAX_LAYERS`.

        Layers for multi-token prediction are not counted; they follow the others.
        """
        found = self.size("block_count")
        if found > MAX_LAYERS:
            raise self.wrong("block_count", f"{found:,}; no model has more than {MAX_LAYERS:,} layers")
        beyond = self.count("nextn_predict_layers")
        if beyond >= found:
            raise self.wrong("nextn_predict_layers", f"{beyond}, of {found} layers")
        return found - beyond

    def size(self, name: str) -> int:
        """Returns a positive integer, which must be present."""
        found = self.optional(name)
        if found is None:
            raise self.wrong(name, "missing")
        return found

    def optional(self, name: str) -> int | None:
        """Returns a positive integer, None where it is absent or 0."""
        return self.count(name) or None

    def count(self, name: str) -> int:
        """Returns an integer, 0 where it is absent."""
        value = self._value(name)
        if value is None:
            return 0
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < MAX_COUNT:
            raise self.wrong(name, f"{_shown(value)}, not a count")
        if value > _MOST.get(name, value):
            raise self.wrong(name, f"{value}, more than {_MOST[name]}")
        return value

    def counts(self, name: str) -> tuple[int, ...]:
        """Returns an integer for each layer; a single one applies to every layer."""
        value, layers = self._value(name), self.layers
        if not isinstance(value, tuple):
            return (self.size(name),) * layers
        whole = [n for n in value if isinstance(n, int) and not isinstance(n, bool) and 0 < n < MAX_COUNT]
        if len(whole) != layers or len(value) != layers:
            raise self.wrong(name, f"{_shown(value)}, not {layers} counts")
        return tuple(whole)

    def values(self, name: str) -> tuple[object, ...]:
        """Returns a list of values, which must be present."""
        value = self._value(name)
        if not isinstance(value, tuple):
            raise self.wrong(name, "missing" if value is None else f"{_shown(value)}, not a list")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a positive float32, as its shortest decimal."""
        found = self._value(name)
        number = positive_number(default if found is None else found)
        if number is None:
            raise self.wrong(name, "missing" if found is None else f"{_shown(found)}, not a positive number")
        return shortest(number)

    def flag(self, name: str, *, default: bool = False) -> bool:
        value = self._value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, f"{_shown(value)}, neither true nor false")
        return value

    def word(self, name: str) -> str | None:
        value = self._value(name)
        return value if isinstance(value, str) else None

    def has(self, name: str) -> bool:
        return f"{self.arch}.{name}" in self.kv

    def rows(self, tensor: str) -> int:
        """Returns the rows of a matrix, of one expert in a stack of them."""
        if tensor not in self.tensors or len(self.tensors[tensor].shape) < 2:
            raise CorruptCheckpoint(f"{self.file}: {tensor} is missing")
        return self.tensors[tensor].shape[-2]

    @property
    def head_size(self) -> int:
        """The elements of a head's key: stated, or the hidden size over the heads."""
        return self.optional("attention.key_length") or max(
            1, self.size("embedding_length") // self.size("attention.head_count")
        )

    def wrong(self, name: str, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.file}: {self.arch}.{name} is {what}")

    def _value(self, name: str) -> object:
        entry = self.kv.get(f"{self.arch}.{name}")
        return None if entry is None else entry.value


def _shown(value: object) -> str:
    return f"a list of {len(value)}" if isinstance(value, tuple) else repr(value)[:80]
