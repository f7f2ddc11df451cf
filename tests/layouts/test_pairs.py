"""Every layout to every layout: what is claimed of each pair, against readers that are not ours.

The table of docs/reference/layouts.md says what comes of each (`python tests/pairs.py` makes it anew).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import pairs

for library in ("mlx.core", "gguf", "bitsandbytes", "compressed_tensors"):
    pytest.importorskip(library, reason="reads what qconvert writes")


@pytest.mark.parametrize("name", pairs.SOURCES)
def test_what_becomes_of_a_layout_in_every_other(name: str, tmp_path: Path) -> None:
    assert pairs.row(name, tmp_path, every=False) in pairs.in_docs(), "run `python tests/pairs.py`"


def test_the_table_has_every_pair() -> None:
    lines = pairs.in_docs()
    assert "\n".join(lines[:2]) == pairs.head()
    assert [line.split(" | ")[0].removeprefix("| ") for line in lines[2:]] == list(pairs.SOURCES)
