"""Builds the calibration text that comes with qconvert, from freely licensed sources in one folder.

Usage: python -m evals.calibration_text SOURCES [OUT]

SOURCES holds the unpacked packages and repositories of `SOURCES_USED`, under their names; the novels are a
file of public-domain prose, found through QCONVERT_ASSETS. OUT (default: qconvert/calibrate/default_text)
gets documents.jsonl.xz, LICENSES.txt and README.md. The same sources and Python version give the same bytes.
Nothing that quality is measured on is read: not the held-out modules of `qconvert.demo.corpus`, not
wikitext-2, not the held-out novel.
"""

from __future__ import annotations

import ast
import hashlib
import json
import lzma
import os
import platform
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.calibration_dialogues import arithmetic, assistant, queries, records, tool_chats, user
from qconvert.demo.corpus import demo_documents

OUT = Path(__file__).resolve().parents[1] / "qconvert" / "calibrate" / "default_text"
LARGEST = 400_000  # bytes of the compressed text
SEED = 13
PIECE = 5000  # characters of a document, at most about
PYPI, NPM, GITHUB = "https://pypi.org/project", "https://www.npmjs.com/package", "https://github.com"
LANGUAGES = {
    "es": "Spanish", "fr": "French", "ja": "Japanese", "ko": "Korean", "pl": "Polish",
    "pt-br": "Brazilian Portuguese", "tr": "Turkish", "uk": "Ukrainian", "zh-cn": "Chinese",
}  # fmt: skip
DOCS_COMMITS = {
    "es": "91f4ccc0baa8", "fr": "b279d876e2a3", "ja": "7eb90aaa6d33", "ko": "d0c58403de22",
    "pl": "c306d49f3e13",
    "pt-br": "a30c8afdb1c6", "tr": "be1c5a492f43", "uk": "d7eb701450aa", "zh-cn": "693cf6be2bc1",
}  # fmt: skip
# Languages of which the catalogues of Django alone are taken.
CATALOGUES = (
    "ar", "bg", "cs", "de", "el", "fa", "fi", "he", "hi", "hu", "id", "it", "nl", "ro", "ru", "sr", "sv",
    "ta", "th", "ur", "vi", "bn",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Used:
    """A source: its folder, where it is to be had, its licence, and the file with the licence's words."""

    folder: str
    where: str
    licence: str
    notice: str


SOURCES_USED = (
    Used("django-5.2.19", f"{PYPI}/Django/5.2.19/", "BSD-3-Clause", "LICENSE"),
    Used("pybind11-3.1.0", f"{PYPI}/pybind11/3.1.0/", "BSD-3-Clause", "*.dist-info/licenses/LICENSE"),
    Used("zod-4.6.7", f"{NPM}/zod/v/4.6.7", "MIT", "package/LICENSE"),
    Used("express-5.3.0", f"{NPM}/express/v/5.3.0", "MIT", "package/LICENSE"),
    Used("better-sqlite3-12.11.1", f"{NPM}/better-sqlite3/v/12.11.1", "public domain (deps/sqlite3)", ""),
    Used("safetensors", f"{GITHUB}/huggingface/safetensors/tree/24b0b2857fef", "Apache-2.0", ""),
    Used("uuid", f"{GITHUB}/google/uuid/tree/2d3c2a9cc518", "BSD-3-Clause", "LICENSE"),
    *(
        Used(
            f"python-docs-{code}",
            f"{GITHUB}/python/python-docs-{code}/tree/{commit}",
            "PSF-2.0; translations contributed under CC0 (PEP 545)",
            "",
        )
        for code, commit in DOCS_COMMITS.items()
    ),
)


class Builder:
    """Reads sources, and remembers the bytes that were read of each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hashes = {used.folder: hashlib.sha256() for used in SOURCES_USED}

    def read(self, path: Path) -> str:
        """A file of a source, as text."""
        data = path.read_bytes()
        self.hashes[path.relative_to(self.folder).parts[0]].update(data)
        return data.decode()

    def files(self, pattern: str) -> list[Path]:
        """The files that a pattern finds, in the order of their names; at least one."""
        found = sorted(self.folder.glob(pattern))
        if not found:
            raise SystemExit(f"{self.folder}/{pattern}: no such file")
        return found

    def catalogue(self, path: Path) -> list[tuple[str, str]]:
        """Originals and translations of a gettext catalogue, but for those that are marked doubtful."""
        entries = re.split(r"\n\s*\n", self.read(path))
        pairs = []
        for entry in entries[1:]:
            strings = re.findall(r'^(msgid|msgstr)((?:\s*".*"\n?)+)', entry + "\n", re.MULTILINE)
            words = {key: "".join(map(ast.literal_eval, re.findall(r'".*"', body))) for key, body in strings}
            if words.get("msgid") and words.get("msgstr") and ", fuzzy" not in entry:
                pairs.append((words["msgid"], words["msgstr"]))
        return pairs


def pieces(text: str, size: int = PIECE) -> Iterator[str]:
    """A text cut at blank lines, or else at ends of lines, into pieces of about `size` characters."""
    piece: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        if length > size or (length > size * 3 // 4 and not line.strip()):
            yield "".join(piece)
            piece, length = [], 0
        piece.append(line)
        length += len(line)
    if length > size // 10:
        yield "".join(piece)


def some(found: list[Any], budget: int, measure: Callable[[Any], str]) -> list[Any]:
    """Entries spread evenly over a list, of about `budget` bytes together."""
    total = sum(len(measure(each).encode()) for each in found)
    step, chosen, due = max(1.0, total / budget), [], 0.0
    for i, each in enumerate(found):
        if i >= due:
            chosen.append(each)
            due += step
    return chosen


def texts(found: list[str], budget: int) -> list[Any]:
    """Documents of pieces, about `budget` bytes of them."""
    return [{"text": text} for text in some(found, budget, str)]


def chats(found: list[Any], budget: int) -> list[Any]:
    """Chats, about `budget` bytes of them."""
    return some(found, budget, lambda chat: json.dumps(chat, ensure_ascii=False))


def novels(budget: int) -> list[Any]:
    """Passages of the novels, and chats that ask for the continuation of one."""
    path = Path(os.environ["QCONVERT_ASSETS"]) / "text" / "calibration-novels.txt"
    found = list(pieces(path.read_text(encoding="utf-8")))
    asking = [text for text in found[5::7] if text.count("\n") > 4]
    continued = []
    for text in asking:
        lines = text.splitlines()
        half = len(lines) // 3
        first, rest = "\n".join(lines[:half]), "\n".join(lines[half:]).strip()
        continued.append({"messages": [user(f"Continue this story:\n\n{first}"), assistant(rest)]})
    return texts(found, budget) + chats(continued, budget // 5)


def library(budget: int) -> list[Any]:
    """Modules of the standard library, its language reference, and chats about its functions."""
    found = demo_documents("train")
    reference = list(pieces(found.pop("pydoc_data")))
    code = [piece for text in found.values() for piece in pieces(text)]
    asked = [chat for name, text in found.items() for chat in _functions(name, text)]
    return texts(code, budget) + texts(reference, budget // 3) + chats(asked, budget // 2)


def _functions(module: str, text: str) -> Iterator[Any]:
    """Chats that ask to write a function, or to explain it, from functions with a docstring."""
    for source in re.findall(r"^(def \w+\(.*?)(?=^\S)", text + "\n\nend", re.DOTALL | re.MULTILINE):
        try:
            (node,) = ast.parse(source).body
        except (SyntaxError, ValueError):
            continue
        doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
        if doc is None or not 40 < len(doc) < 900 or not 200 < len(source) < 3000:
            continue
        assert isinstance(node, ast.FunctionDef)
        code = f"```python\n{source.rstrip()}\n```"
        if len(source) % 2:
            yield {"messages": [user(f"Write a Python function `{node.name}`.\n\n{doc}"), assistant(code)]}
        else:
            yield {"messages": [user(f"What does this function of `{module}` do?\n\n{code}"), assistant(doc)]}


def languages(builder: Builder, budget: int) -> list[Any]:
    """The Python tutorial and FAQ in nine languages: prose, questions with answers, translations."""
    made = []
    for code, language in LANGUAGES.items():
        tutorial = [builder.catalogue(path) for path in builder.files(f"python-docs-{code}/tutorial/*.po")]
        prose = [piece for pairs in tutorial for piece in pieces("\n\n".join(own for _, own in pairs) + "\n")]
        faq = [builder.catalogue(path) for path in builder.files(f"python-docs-{code}/faq/*.po")]
        made += texts(prose, budget)
        made += chats([chat for pairs in faq for chat in _answers(pairs)], budget)
        long = [pair for pairs in tutorial for pair in pairs if 150 < len(pair[0]) < 900]
        made += chats([_translation(pair, language, i % 2 == 0) for i, pair in enumerate(long)], budget // 4)
    return made


def _answers(pairs: list[tuple[str, str]]) -> Iterator[Any]:
    """Chats from headings that ask and the paragraphs below them, in the language of the translation."""
    asked, said = "", list[str]()
    for original, own in [*pairs, ("?", "?")]:
        if original.endswith("?") and len(original) < 150:
            if asked and said:
                yield {"messages": [user(asked), assistant("\n\n".join(said))]}
            asked, said = own, []
        else:
            said.append(own)


def _translation(pair: tuple[str, str], language: str, forth: bool) -> Any:
    original, own = pair
    target, given, wanted = (language, original, own) if forth else ("English", own, original)
    return {"messages": [user(f"Translate into {target}:\n\n{given}"), assistant(wanted)]}


def catalogues(builder: Builder, budget: int) -> list[Any]:
    """Messages of Django in more languages."""
    made = []
    for code in CATALOGUES:
        (path,) = builder.files(f"django-5.2.19/django/conf/locale/{code}/LC_MESSAGES/django.po")
        own = [own for _, own in builder.catalogue(path) if len(own) > 12 and "%" not in own]
        made += texts(list(pieces("\n".join(own) + "\n", PIECE // 3)), budget)
    return made


def technical(builder: Builder, budget: int) -> list[Any]:
    """Django's documentation and the readme files of packages; its FAQ as chats."""
    docs = [
        builder.read(p)
        for part in ("intro", "topics", "howto")
        for p in builder.files(f"django-5.2.19/docs/{part}/*.txt")
    ]
    markdown = [
        builder.read(builder.files(name)[0])
        for name in ("zod-*/package/README.md", "express-*/package/Readme.md")
    ]
    faq = []
    for path in builder.files("django-5.2.19/docs/faq/*.txt"):
        parts = re.split(r"^([^\n]*\?)\n=+\n", builder.read(path), flags=re.MULTILINE)
        faq += [
            {"messages": [user(q), assistant(a.strip())]}
            for q, a in zip(parts[1::2], parts[2::2], strict=True)
        ]
    return (
        texts([p for d in docs for p in pieces(d)], budget)
        + texts([p for d in markdown for p in pieces(d)], budget // 3)
        + chats(faq, budget // 3)
    )


def code(builder: Builder, budget: int) -> list[Any]:
    """Code in C, C++, CSS, Go, HTML, JavaScript, Rust and TypeScript."""
    patterns = (
        "better-sqlite3-*/package/deps/sqlite3/sqlite3.c", "pybind11-*/pybind11/include/pybind11/*.h",
        "django-*/django/contrib/admin/static/admin/css/*.css", "uuid/*.go",
        "django-*/django/contrib/admin/templates/admin/*.html", "express-*/package/lib/*.js",
        "safetensors/safetensors/src/*.rs", "zod-*/package/src/v4/core/*.ts",
    )  # fmt: skip
    made = []
    for pattern in patterns:
        whole = "\n".join(builder.read(path) for path in builder.files(pattern) if "_test" not in path.name)
        made += texts(list(pieces(whole)), budget)
    return made


def documents(builder: Builder) -> list[Any]:
    """All documents, in an order in which every beginning is a mixture."""
    rng = random.Random(SEED)
    made = [
        *novels(150_000),
        *library(150_000),
        *languages(builder, 14_000),
        *catalogues(builder, 3_000),
        *technical(builder, 60_000),
        *code(builder, 15_000),
        *arithmetic(rng, 130),
        *tool_chats(rng, 60),
        *({"text": text} for text in queries(rng, 20)),
        *({"text": text} for text in records(rng, 24)),
    ]
    rng.shuffle(made)
    return made


README = """# The calibration text that comes with qconvert

`documents.jsonl.xz` holds {count} documents ({raw:,} bytes, {packed:,} compressed), each a text or the
messages of a chat, in a mixed order. `python -m evals.calibration_text SOURCES` made it (Python {python},
seed {seed}). SHA-256 of the text: `{sha256}`.

When it is cut into tokens, 5 % of random ones are added, and chats are put into the model's own template. No
text that quality is measured on is in it.

| source | licence | SHA-256 of what was read |
|---|---|---|
{table}

Prose: public-domain English novels (`text/calibration-novels.txt` of the assets). Python's standard library
{python} (modules of `qconvert.demo.corpus.TRAIN`): PSF-2.0. Arithmetic, tool calls, SQL, JSON, YAML and CSV
are made by `evals/calibration_dialogues.py` and are part of qconvert. `LICENSES.txt` repeats the notices.
"""


def write(builder: Builder, out: Path) -> None:
    """Write the text, the notices and the record of the sources."""
    found = documents(builder)
    raw = "".join(json.dumps(each, ensure_ascii=False) + "\n" for each in found).encode()
    packed = lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)
    if len(packed) > LARGEST:
        raise SystemExit(f"{len(packed)} bytes are over {LARGEST}")
    out.mkdir(exist_ok=True)
    (out / "documents.jsonl.xz").write_bytes(packed)
    notices = [(u, builder.files(f"{u.folder}/{u.notice}")[0]) for u in SOURCES_USED if u.notice]
    python = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    notices.append(
        (
            Used(f"Python {platform.python_version()}", "https://docs.python.org/3/license.html", "", ""),
            python,
        )
    )
    licences = [
        f"{u.folder} ({u.where})\n\n{path.read_text(encoding='utf-8').strip()}\n" for u, path in notices
    ]
    (out / "LICENSES.txt").write_text(("\n" + "-" * 80 + "\n\n").join(licences), encoding="utf-8")
    rows = [
        f"| [{u.folder}]({u.where}) | {u.licence} | `{builder.hashes[u.folder].hexdigest()[:16]}` |"
        for u in SOURCES_USED
    ]
    record = README.format(
        count=len(found), raw=len(raw), packed=len(packed), python=platform.python_version(), seed=SEED,
        sha256=hashlib.sha256(raw).hexdigest(), table="\n".join(rows),
    )  # fmt: skip
    (out / "README.md").write_text(record, encoding="utf-8")
    print(f"{len(found)} documents, {len(raw):,} bytes, {len(packed):,} compressed")


if __name__ == "__main__":
    write(Builder(Path(sys.argv[1]).resolve()), Path(sys.argv[2]) if len(sys.argv) > 2 else OUT)
