"""Reads typed values of config.json; each is checked against a bound before it is used."""

from __future__ import annotations

from difflib import get_close_matches

from qconvert.core.dtypes import Json
from qconvert.core.numbers import positive_number
from qconvert.errors import CorruptCheckpoint

MAX_DIMENSION = 1 << 32
MAX_LAYERS = 4096
# Over all layers; the largest mixture models have 25,000.
MAX_EXPERTS = 1 << 17


def positive_int(config: Json, key: str, most: int = MAX_DIMENSION) -> int:
    """Returns the integer under `key`; CorruptCheckpoint unless it is present and in 1..most."""
    value = optional_int(config, key, most)
    if value is None:
        near = get_close_matches(key, config, n=1)
        raise CorruptCheckpoint(
            f"config.json: {key} is missing",
            f"did the file mean {near[0]!r}?" if near else "fetch the model's config.json again",
        )
    return value


def optional_int(config: Json, key: str, most: int = MAX_DIMENSION) -> int | None:
    """Returns the integer under `key`, in 1..most; None when it is absent or null."""
    value = config.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise CorruptCheckpoint(f"config.json: {key} is {value!r}, not a whole number")
    if not 1 <= value <= most:
        raise CorruptCheckpoint(f"config.json: {key} is {value}, outside 1..{most}")
    return value


def count(config: Json, key: str) -> int:
    """Returns the integer under `key`, which may be 0; 0 when it is absent or null."""
    return 0 if config.get(key) == 0 else optional_int(config, key) or 0


def divided(config: Json, key: str, by: str) -> int:
    """Returns the integer under `key` divided by the one under `by`; CorruptCheckpoint on a remainder."""
    return divide(positive_int(config, key), positive_int(config, by), key, by)


def divide(whole: int, parts: int, key: str, by: str) -> int:
    """Returns `whole / parts`; CorruptCheckpoint on a remainder. `key` and `by` name the two in the error."""
    if whole % parts:
        raise CorruptCheckpoint(f"config.json: {key} = {whole} is not divisible by {by} = {parts}")
    return whole // parts


def flag(config: Json, key: str, *, default: bool = False) -> bool:
    """Returns the boolean under `key`; `default` when it is absent or null."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise CorruptCheckpoint(f"config.json: {key} is {value!r}, neither true nor false")
    return value


def whole_numbers(config: Json, key: str) -> tuple[int, ...]:
    """Returns the list of integers under `key`, at most one for each layer; () when it is absent or null."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > MAX_LAYERS:
        raise CorruptCheckpoint(f"config.json: {key} is not a list of layers")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= MAX_DIMENSION for n in value):
        raise CorruptCheckpoint(f"config.json: {key} is not a list of whole numbers")
    return tuple(value)


def per_layer(config: Json, key: str, layer: int) -> float:
    """Returns the number for one layer from the list under `key`; a single number applies to every layer."""
    value = config.get(key)
    number = positive_number(value[layer] if isinstance(value, list) and layer < len(value) else value)
    if number is None or number > MAX_DIMENSION:
        raise CorruptCheckpoint(f"config.json: {key} has no positive number for layer {layer}")
    return number
