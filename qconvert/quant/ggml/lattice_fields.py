"""Reads and writes what blocks of IQ1, IQ2 and IQ3 hold: points of a lattice, signs, and scales.

Source: the block structs of ggml-common.h, and dequantize_row_iq1_* to dequantize_row_iq3_* in ggml-quants.c.

Axes: N blocks, B bytes of a block, C points of a block, E eights of a block's columns, G groups with a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from qconvert.quant.ggml.code_fields import fields, joined

_SEVEN, _SHIFTED = np.uint8(0x7F), np.uint8(8)
_SEVENS = 7 * np.arange(4, dtype=np.uint32)
_THREES = 3 * np.arange(4, dtype=np.uint16)


class LatticeCodes(NamedTuple):
    """What blocks, or rows of them (N is R then), hold beside scales.

    `indices_NC` uint16: of the points, one per 8 columns, or 4 (IQ3). `signs_NE` uint8: bit i is set where
    element i of 8 is negative; of IQ1, bit 0 is set where the shift of 8 elements is negative.
    """

    indices_NC: np.ndarray
    signs_NE: np.ndarray


def read_lattice(type_name: str, blocks_NB: np.ndarray) -> LatticeCodes:
    """Returns the codes of blocks, uint8 [N, B], of an IQ1, IQ2 or IQ3 type."""
    return LatticeCodes(*_FORMS[type_name].read(blocks_NB))


def put_lattice(type_name: str, blocks_NB: np.ndarray, codes: LatticeCodes) -> None:
    """Writes codes into blocks, uint8 [N, B], in place; leaves all other bits.

    Of IQ2_XXS, IQ2_XS and IQ3_XXS an even number of each 8 elements must be negative; of IQ1_S the shifts of
    32 elements must have one sign.
    """
    _FORMS[type_name].put(blocks_NB, *codes)


def lattice_steps(type_name: str, blocks_NB: np.ndarray) -> np.ndarray:
    """Returns what points are multiplied by, float32 [N, G]: products in the decoders' order."""
    return _FORMS[type_name].steps(blocks_NB)


_Read = tuple[np.ndarray, np.ndarray]


class _Form(NamedTuple):
    """How a type stores what it holds."""

    read: Callable[[np.ndarray], _Read]
    put: Callable[[np.ndarray, np.ndarray, np.ndarray], None]
    steps: Callable[[np.ndarray], np.ndarray]


def _words(blocks_NB: np.ndarray, start: int, stop: int, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(blocks_NB[:, start:stop]).view(dtype)


def _bytes(words: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(words, dtype).view(np.uint8)


def _scale(blocks_NB: np.ndarray) -> np.ndarray:
    return _words(blocks_NB, 0, 2, "<f2").astype(np.float32)


def _with_halves(d_N1: np.ndarray, codes_NG: np.ndarray, share: float) -> np.ndarray:
    """d * (1/2 + code) * share."""
    return np.asarray(d_N1 * (np.float32(0.5) + codes_NG.astype(np.float32)) * np.float32(share))


def _with_odds(d_N1: np.ndarray, codes_NG: np.ndarray) -> np.ndarray:
    """d * (2 * code + 1)."""
    return np.asarray(d_N1 * (2 * codes_NG.astype(np.float32) + np.float32(1)))


def _eighth(signs_NE: np.ndarray) -> np.ndarray:
    """Seven signs with the eighth, which makes the number of negative ones even."""
    odd = signs_NE & _SEVEN
    for shift in (4, 2, 1):
        odd = odd ^ odd >> np.uint8(shift)
    return np.asarray(signs_NE & _SEVEN | (odd & np.uint8(1)) << np.uint8(7))


def _signs_of_words(words_NG: np.ndarray) -> np.ndarray:
    """The signs in words that hold four times seven of them, and the scale in the top four bits."""
    return _eighth((words_NG[:, :, None] >> _SEVENS).astype(np.uint8).reshape(len(words_NG), -1))


def _words_with_signs(words_NG: np.ndarray, signs_NE: np.ndarray) -> np.ndarray:
    seven = (signs_NE & _SEVEN).astype(np.uint32).reshape(*words_NG.shape, 4)
    return np.asarray(words_NG & np.uint32(15 << 28) | np.bitwise_or.reduce(seven << _SEVENS, axis=2))


# IQ2_XXS: d; for each 32 elements, four bytes of indices and a word of signs and scale.


def _words_iq2_xxs(blocks_NB: np.ndarray) -> np.ndarray:
    return _words(blocks_NB, 2, 66, "<u4")[:, 1::2]


def _read_iq2_xxs(blocks_NB: np.ndarray) -> _Read:
    indices = blocks_NB[:, 2:].reshape(-1, 8, 8)[:, :, :4]
    return indices.reshape(-1, 32).astype(np.uint16), _signs_of_words(_words_iq2_xxs(blocks_NB))


def _put_iq2_xxs(blocks_NB: np.ndarray, indices_NC: np.ndarray, signs_NE: np.ndarray) -> None:
    words = _bytes(_words_with_signs(_words_iq2_xxs(blocks_NB), signs_NE), "<u4").reshape(-1, 8, 4)
    indices = indices_NC.astype(np.uint8).reshape(-1, 8, 4)
    blocks_NB[:, 2:] = np.concatenate((indices, words), axis=2).reshape(-1, 64)


# IQ2_XS: d; words of nine bits of index and seven signs; nibbles of scales.


def _read_iq2_xs(blocks_NB: np.ndarray) -> _Read:
    words = _words(blocks_NB, 2, 66, "<u2")
    return words & np.uint16(511), _eighth((words >> 9).astype(np.uint8))


def _put_iq2_xs(blocks_NB: np.ndarray, indices_NC: np.ndarray, signs_NE: np.ndarray) -> None:
    blocks_NB[:, 2:66] = _bytes(indices_NC | (signs_NE & _SEVEN).astype(np.uint16) << 9, "<u2")


# IQ2_S, IQ3_S: d; the low bytes of indices, and their other bits; all signs; nibbles of scales.


def _form_s(points: int, bits: int, high: int, signs: int, steps: Callable[..., np.ndarray]) -> _Form:
    """`points` indices of 8 + `bits` bits, whose high bits begin at byte `high`, and signs at `signs`."""
    end = high + points * bits // 8

    def read(blocks_NB: np.ndarray) -> _Read:
        above = fields(blocks_NB[:, high:end], bits, 1).astype(np.uint16)
        return blocks_NB[:, 2 : 2 + points] | above << 8, blocks_NB[:, signs : signs + 32].copy()

    def put(blocks_NB: np.ndarray, indices_NC: np.ndarray, signs_NE: np.ndarray) -> None:
        blocks_NB[:, 2 : 2 + points] = indices_NC.astype(np.uint8)
        blocks_NB[:, high:end] = joined((indices_NC >> 8).astype(np.uint8), bits, 1)
        blocks_NB[:, signs : signs + 32] = signs_NE

    return _Form(read, put, steps)


# IQ3_XXS: d; bytes of indices; for each 32 elements a word of signs and scale.


def _read_iq3_xxs(blocks_NB: np.ndarray) -> _Read:
    return blocks_NB[:, 2:66].astype(np.uint16), _signs_of_words(_words(blocks_NB, 66, 98, "<u4"))


def _put_iq3_xxs(blocks_NB: np.ndarray, indices_NC: np.ndarray, signs_NE: np.ndarray) -> None:
    blocks_NB[:, 2:66] = indices_NC.astype(np.uint8)
    words = _words_with_signs(_words(blocks_NB, 66, 98, "<u4"), signs_NE)
    blocks_NB[:, 66:] = _bytes(words, "<u4")


# IQ1_S: d; the low bytes of indices; words of four times their three high bits, a scale, the shift's sign.


def _read_iq1_s(blocks_NB: np.ndarray) -> _Read:
    words = _words(blocks_NB, 34, 50, "<u2")
    above = (words[:, :, None] >> _THREES & np.uint16(7)).reshape(-1, 32)
    return blocks_NB[:, 2:34] | above << 8, np.repeat((words >> 15).astype(np.uint8), 4, axis=1)


def _put_iq1_s(blocks_NB: np.ndarray, indices_NC: np.ndarray, signs_NE: np.ndarray) -> None:
    words = _words(blocks_NB, 34, 50, "<u2") & np.uint16(7 << 12)
    above = (indices_NC >> 8).reshape(-1, 8, 4) << _THREES
    words = words | np.bitwise_or.reduce(above, axis=2) | signs_NE[:, ::4].astype(np.uint16) << 15
    blocks_NB[:, 2:34] = indices_NC.astype(np.uint8)
    blocks_NB[:, 34:] = _bytes(words, "<u2")


def _steps_iq1_s(blocks_NB: np.ndarray) -> np.ndarray:
    return _with_odds(_scale(blocks_NB), _words(blocks_NB, 34, 50, "<u2") >> 12 & 7)


# IQ1_M: the low bytes of indices; nibbles of three high bits and the shift's sign; words of four scales and
# four bits of d.


def _read_iq1_m(blocks_NB: np.ndarray) -> _Read:
    nibbles = fields(blocks_NB[:, 32:48], 4, 1)
    return blocks_NB[:, :32] | (nibbles & np.uint8(7)).astype(np.uint16) << 8, nibbles >> np.uint8(3)


def _put_iq1_m(blocks_NB: np.ndarray, indices_NC: np.ndarray, signs_NE: np.ndarray) -> None:
    blocks_NB[:, :32] = indices_NC.astype(np.uint8)
    nibbles = (indices_NC >> 8).astype(np.uint8) | signs_NE * _SHIFTED
    blocks_NB[:, 32:48] = joined(nibbles, 4, 1)


def _steps_iq1_m(blocks_NB: np.ndarray) -> np.ndarray:
    words = _words(blocks_NB, 48, 56, "<u2")
    quarters = words >> 12 << 4 * np.arange(4, dtype=np.uint16)
    d_N1 = np.bitwise_or.reduce(quarters, axis=1, keepdims=True).view("<f2").astype(np.float32)
    return _with_odds(d_N1, (words[:, :, None] >> _THREES & np.uint16(7)).reshape(-1, 16))


_FORMS: Mapping[str, _Form] = {
    "IQ1_S": _Form(_read_iq1_s, _put_iq1_s, _steps_iq1_s),
    "IQ1_M": _Form(_read_iq1_m, _put_iq1_m, _steps_iq1_m),
    "IQ2_XXS": _Form(
        _read_iq2_xxs, _put_iq2_xxs, lambda b: _with_halves(_scale(b), _words_iq2_xxs(b) >> 28, 0.25)
    ),
    "IQ2_XS": _Form(
        _read_iq2_xs, _put_iq2_xs, lambda b: _with_halves(_scale(b), fields(b[:, 66:], 4, 1), 0.25)
    ),
    "IQ2_S": _form_s(32, 2, 66, 34, lambda b: _with_halves(_scale(b), fields(b[:, 74:], 4, 1), 0.25)),
    "IQ3_XXS": _Form(
        _read_iq3_xxs,
        _put_iq3_xxs,
        lambda b: _with_halves(_scale(b), _words(b, 66, 98, "<u4") >> 28, 0.5),
    ),
    "IQ3_S": _form_s(64, 1, 66, 74, lambda b: _with_odds(_scale(b), fields(b[:, 106:], 4, 1))),
}
LATTICES = frozenset(_FORMS)
"""The names of the types whose codes are points of a lattice."""
