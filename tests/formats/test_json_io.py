"""JSON from strangers: what Python's parser lets through, and what would hurt it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qconvert.errors import CorruptCheckpoint
from qconvert.formats.io.strict_json import parse_json_object, read_json_object

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), values), st.booleans())
def test_every_strict_object_is_read(value: dict[str, object], escaped: bool) -> None:
    assert parse_json_object(json.dumps(value, ensure_ascii=escaped).encode(), "x") == value


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        (b"", "is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        (b"[1]", "holds a JSON list, not an object"),
        (b'"\xc3\xa9"', "holds a JSON string, not an object"),
        (b"\xef\xbb\xbf{}", "starts with a byte-order mark"),
        ("{}".encode("utf-16"), "starts with a byte-order mark"),
        (b'{"a": "\xff"}', "is not UTF-8 at byte 7"),
        (b'{"rope_theta": NaN}', "rope_theta is nan, not a finite number"),
        (b'{"rope_theta": -Infinity}', "rope_theta is -inf, not a finite number"),
        (b'{"rope_theta": 1e999}', "rope_theta is inf, not a finite number"),
        (b'{"scales": [1.0, [NaN]]}', "scales is nan, not a finite number"),
        (b'{"a": {"b": 1, "b": 2}}', "b appears twice"),
        (b'{"a\\u202e": 1, "a\\u202e": 1}', "'a\\u202e' appears twice"),
        (b'{"a": "\\ud800"}', "a holds half of a surrogate pair"),
        (b'{"\\udfff": 0}', "'\\udfff' holds half of a surrogate pair"),
        (b'{"a": 0, "x": ' + b"[" * 100_000, "x is nested too deeply to be read"),
        (b'{"a": {"\\"[": ' + b'{"a":' * 100_000, "a is nested too deeply to be read"),
        (
            b'{"a": [' + b"{}," * 1_700_000,
            "holds 1,700,002 brackets (limit 1,600,000), more than any model needs",
        ),
        (b"[" * 100_000, "is nested too deeply to be read"),
    ],
)
def test_what_is_not_strict_is_refused_by_name(text: bytes, fact: str) -> None:
    with pytest.raises(CorruptCheckpoint) as refused:
        parse_json_object(text, "config.json")
    assert refused.value.fact == f"config.json: {fact}"


def test_numbers_of_many_digits_cost_no_time() -> None:
    with pytest.raises(CorruptCheckpoint, match="not valid JSON"):
        parse_json_object(b'{"a": ' + b"9" * 1_000_000 + b"}", "config.json")


def test_infinity_in_a_list_means_no_limit() -> None:
    assert parse_json_object(b'{"time_step_limit": [0.0, Infinity]}', "x") == {
        "time_step_limit": [0.0, float("inf")]
    }


def test_real_configs_are_read(assets: Path) -> None:
    for path in (assets / "metadata" / "configs").glob("*.json"):
        assert read_json_object(path) == json.loads(path.read_text())


def test_size_is_bounded(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"{}" + b" " * 98)
    assert read_json_object(path, max_bytes=100) == {}
    with pytest.raises(CorruptCheckpoint, match=r"config\.json: has 100 bytes, the limit is 99 bytes"):
        read_json_object(path, max_bytes=99)
