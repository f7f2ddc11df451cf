"""The table of supported models in docs/reference/models.md is the catalogue's own.

`python tests/models/test_families_docs.py` writes it there.
"""

from __future__ import annotations

from pathlib import Path

from qconvert.models.support_table import markdown

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "models.md"
START, END = "<!-- models -->\n", "\n<!-- end of models -->"


def with_table(text: str) -> str:
    """The text with the catalogue between its markers."""
    before, rest = text.split(START)
    _, after = rest.split(END.lstrip("\n"))
    return f"{before}{START}{markdown()}{END}{after}"


def test_the_table_of_supported_models_is_generated() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run `python tests/models/test_families_docs.py`"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
