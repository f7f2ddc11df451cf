"""Changes real small files: bytes anywhere, and the values of JSON where they stand."""

from __future__ import annotations

import json
import random
import struct
from typing import Any

# What readers get wrong: borders of types, and of what they multiply.
NUMBERS = (
    0,
    1,
    -1,
    2,
    3,
    7,
    255,
    256,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**47,
    2**53,
    2**63,
    2**64,
    10**400,
)
TEXTS = (
    "",
    "\0",
    "\x1b]0;title\x07",
    "\u202e",
    "../../x",
    "a" * 5000,
    "{",
    "%s",
    "\ud800",
    "é",
    "model.safetensors",
)
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    0.5,
    -0.0,
    1e308,
    1e-320,
    [],
    {},
    [[]],
    [{}],
    {"": {}},
    [None] * 9,
)


def changed_bytes(raw: bytes, rng: random.Random, most: int = 6) -> bytes:
    """Some bytes flipped, set, cut out, repeated or put in; numbers of 2, 4 and 8 bytes replaced."""
    found = bytearray(raw)
    for _ in range(rng.randint(1, most)):
        at = rng.randrange(len(found) + 1)
        end = min(len(found), at + rng.choice((1, 2, 4, 8, 32, 500)))
        match rng.randrange(7):
            case 0 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(found):
                found[at] = rng.choice((0, 1, 0x20, 0x22, 0x2C, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del found[at:end]
            case 3:
                found[at:at] = found[at:end]
            case 4:
                found[at:at] = rng.randbytes(rng.choice((1, 2, 8)))
            case 5:
                width, kind = rng.choice(((2, "<H"), (4, "<I"), (8, "<Q")))
                number = rng.choice(NUMBERS) % (1 << 8 * width)
                found[at : at + width] = struct.pack(kind, number)
            case _ if rng.random() < 0.2:
                del found[at:]
    return bytes(found)


def changed_value(value: Any, rng: random.Random) -> Any:
    """A value of JSON in which one thing, somewhere, is another."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        fields = dict(value)
        match rng.randrange(8):
            case 0:
                del fields[key]
            case 1:
                fields[rng.choice(TEXTS)] = fields.pop(key)
            case 2:
                fields[key] = value[rng.choice(list(value))]
            case _:
                fields[key] = changed_value(value[key], rng)
        return fields
    if isinstance(value, list) and value and rng.random() < 0.9:
        at, items = rng.randrange(len(value)), list(value)
        match rng.randrange(6):
            case 0:
                del items[at]
            case 1:
                items[at:at] = [items[at]] * rng.choice((1, 2, 100))
            case _:
                items[at] = changed_value(items[at], rng)
        return items
    if isinstance(value, int) and rng.random() < 0.3:
        return value + rng.choice((-1, 1, value))
    return rng.choice((*NUMBERS, *TEXTS, *OTHERS))


def changed_json(raw: bytes, rng: random.Random) -> bytes:
    """JSON of which some values are others, or, one time in four, whose bytes are."""
    if rng.random() < 0.25:
        return changed_bytes(raw, rng)
    value = json.loads(raw)
    for _ in range(rng.randint(1, 3)):
        value = changed_value(value, rng)
    return json.dumps(value).encode()
