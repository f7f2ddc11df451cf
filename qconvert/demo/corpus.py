"""Reads the texts that the embedded model is trained on and evaluated on.

Both come from the standard library of the running Python: source files with their docstrings, and the
language reference inside `pydoc_data`. Nothing is downloaded and nothing is copied into this package, and
no module is imported to be read. The two lists below name modules that exist in every Python from 3.10 to
3.14 and never share one, so what is evaluated was never trained on. The text itself depends on the Python
version, which is why every `CorpusText` carries its hash and its version.
"""

import ast
import hashlib
import platform
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Kind = Literal["held-out", "train"]

HELD_OUT: Final = (
    "statistics", "argparse", "difflib", "textwrap", "tarfile", "typing", "fractions", "configparser",
    "inspect", "dataclasses", "shutil", "heapq", "calendar", "gettext", "random", "shlex", "csv",
)  # fmt: skip
"""Modules to evaluate on. A short evaluation reads from the front, so the order mixes prose and code."""

TRAIN: Final = (
    "__future__", "_collections_abc", "_compat_pickle", "_markupbase", "_osx_support", "_py_abc",
    "_pydecimal", "_pyio", "_sitebuiltins", "_strptime", "_threading_local", "_weakrefset", "abc",
    "antigravity", "ast", "asyncio", "base64", "bdb", "bisect", "bz2", "cProfile", "cmd", "code",
    "codecs", "codeop", "collections", "colorsys", "compileall", "concurrent", "contextlib",
    "contextvars", "copy", "copyreg", "ctypes", "curses", "datetime", "dbm", "decimal", "dis",
    "doctest", "email", "enum", "filecmp", "fileinput", "fnmatch", "ftplib", "functools", "genericpath",
    "getopt", "getpass", "glob", "graphlib", "gzip", "hashlib", "hmac", "html", "http", "idlelib",
    "imaplib", "importlib", "io", "ipaddress", "json", "keyword", "linecache", "locale", "logging",
    "lzma", "mailbox", "mimetypes", "modulefinder", "multiprocessing", "netrc", "ntpath", "numbers",
    "opcode", "operator", "optparse", "os", "pathlib", "pdb", "pickle", "pickletools", "pkgutil",
    "platform", "plistlib", "poplib", "posixpath", "pprint", "profile", "pstats", "pty", "py_compile",
    "pyclbr", "pydoc", "pydoc_data", "queue", "quopri", "re", "reprlib", "rlcompleter", "runpy",
    "sched", "secrets", "selectors", "shelve", "signal", "site", "smtplib", "socket", "socketserver",
    "sqlite3", "ssl", "stat", "string", "stringprep", "struct", "subprocess", "symtable", "sysconfig",
    "tabnanny", "tempfile", "this", "threading", "timeit", "tkinter", "token", "tokenize", "trace",
    "traceback", "tracemalloc", "tty", "turtle", "turtledemo", "types", "unittest", "urllib", "uuid",
    "venv", "warnings", "wave", "weakref", "webbrowser", "wsgiref", "xml", "xmlrpc", "zipapp",
    "zipfile", "zipimport", "zoneinfo",
)  # fmt: skip
"""Modules and packages to train on. Test suites, and `encodings` with its tables, stay out of both lists."""

_MODULES: Final[dict[Kind, tuple[str, ...]]] = {"held-out": HELD_OUT, "train": TRAIN}
_MAX_CHARS: Final[dict[Kind, int]] = {"held-out": 2 << 20, "train": 16 << 20}
SPARE_TEXT: Final = Path(__file__).with_name("spare_text.txt")
"""Prose and code of our own in the manner of the standard library, a little longer than one window of the
embedded model. It is evaluation text and nothing else: no code in it is ever run."""
_TESTS: Final = {"test", "tests", "idle_test"}


@dataclass(frozen=True, slots=True)
class CorpusText:
    """A text and where it came from."""

    text: str
    """The modules' files in list order, joined by blank lines."""
    sha256: str
    """Hash of `text` as UTF-8: two results are comparable when this is equal."""
    python_version: str
    modules: tuple[str, ...]
    """Modules that were read."""
    missing: tuple[str, ...]
    """Modules whose sources this installation lacks."""
    fallback: bool
    """True when no source was found (a stripped or zipped installation), and `text` is the few kilobytes
    that this package carries itself: good enough to see the commands work, too short for a measurement."""


def demo_text(kind: Kind) -> CorpusText:
    """Text of the running Python's standard library: at most 2 Mi characters held out, 16 Mi to train on."""
    documents = demo_documents(kind)
    text = "\n\n".join(documents.values())[: _MAX_CHARS[kind]] or SPARE_TEXT.read_text(encoding="utf-8")
    return CorpusText(
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        python_version=platform.python_version(),
        modules=tuple(documents),
        missing=tuple(name for name in _MODULES[kind] if name not in documents),
        fallback=not documents,
    )


def demo_documents(kind: Kind) -> dict[str, str]:
    """Text by module name, in list order, for the modules whose sources exist here."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    found = {}
    for name in _MODULES[kind]:
        # A module is a file in some Python versions and a package in others.
        module, package = stdlib / f"{name}.py", stdlib / name
        inside = (p for p in sorted(package.rglob("*.py")) if _TESTS.isdisjoint(p.relative_to(package).parts))
        found[name] = "\n\n".join(map(_read, [module] if module.is_file() else inside))
    return {name: text for name, text in found.items() if text}


def _read(path: Path) -> str:
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.parent.name != "pydoc_data" or path.stem != "topics":
        return text
    # The language reference as prose: up to Python 3.12 the file has it in quoted one-line pieces.
    values = [node.value for node in ast.parse(text).body if isinstance(node, ast.Assign)]
    return "\n\n".join(prose for value in values for prose in ast.literal_eval(value).values())
