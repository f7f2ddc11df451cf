"""Running recorded commands, and saying what they wrote in a form that can be kept and compared.

A run has a folder of its own:

    ROOT/sources/NAME   checkpoints and files that tests/golden_models.py makes
    ROOT/zoo/NAME       recorded checkpoints of families, with a tokenizer
    ROOT/assets         a link to the folder of fixtures
    ROOT/runs/NAME      the current folder of the command NAME, and so what it wrote

Commands get relative paths, because some are written into files (an importance matrix is named in the GGUF).
Binary files are hashed as they are. In texts a few things are masked: see `masked`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.golden_models import SOURCES, zoo
from tests.support.commands import Ran, qconvert

WRITING = (
    "quantize", "fuse-qkv", "fuse", "unfuse", "tie", "untie", "dequantize", "convert", "to-gguf", "from-gguf",
)  # fmt: skip
BINARY = (".safetensors", ".gguf")
# A text of at most so many bytes is kept; of a longer one, hashes of its parts.
KEPT = 600
# What a text may say of the day, the machine and the release, and what stands there in the record.
MASKS: tuple[tuple[str, str], ...] = (
    (r'("seconds": )[\d.e+-]+', r"\g<1>SECONDS"),
    (r'"seconds_by_stage": \{[^}]*\}, "peak_memory": \d+, ', ""),
    (r"(done in )[\d.]+ s\b", r"\g<1>SECONDS"),
    (r'("name": "qconvert",\s+"version": ")[^"]+', r"\g<1>VERSION"),
    (r"(\[qconvert\]\(https://pypi\.org/project/qconvert/\) )[\w.+]+", r"\g<1>VERSION"),
    (r"compiling kernels: first use on this machine, cached afterwards\n", ""),
)
Record = dict[str, Any]


@dataclass(frozen=True)
class Command:
    """A command line; what is in braces is a source, `{@NAME}` the output of another command.

    A writing command gets `-o out` (or `out.gguf`) and `--json`, unless it is to be run as it is typed.
    With `plan`, what `--dry-run` says is recorded too.
    """

    name: str
    line: str
    code: int = 0
    typed: bool = False
    plan: bool = False

    @property
    def words(self) -> list[str]:
        """The words, sources still in braces."""
        words = self.line.split()
        if self.typed or words[0] not in WRITING:
            return words
        return [*words, *(() if "-o" in words else ("-o", self.out)), "--json"]

    @property
    def out(self) -> str:
        """The name of the output in the command's folder."""
        words = self.line.split()
        if "-o" in words:
            return words[words.index("-o") + 1]
        return "out.gguf" if words[0] == "to-gguf" or "--to gguf" in self.line else "out"

    @property
    def sources(self) -> list[str]:
        """What stands in braces."""
        return re.findall(r"\{([^{}]+)\}", self.line)


def assets_folder() -> Path | None:
    """The folder of fixtures, if it is there."""
    default = Path(__file__).resolve().parents[1].parent / "shared" / "assets"
    folder = Path(os.environ.get("QCONVERT_ASSETS", default))
    return folder.resolve() if folder.is_dir() else None


def needs_assets(name: str, table: Mapping[str, Command]) -> bool:
    """Whether a command, or one whose output it reads, starts from a fixture."""
    return any(
        source == "assets"
        or source.startswith("zoo:")
        or (source.startswith("@") and needs_assets(source[1:], table))
        for source in table[name].sources
    )


class Runs:
    """The commands of a table in a folder: each is run once, its sources before it."""

    def __init__(
        self, root: Path, table: Mapping[str, Command], *, jobs: int | None = None, texts: Path | None = None
    ) -> None:
        self.root, self.table, self.jobs, self.texts = root.resolve(), table, jobs, texts
        self.assets = assets_folder()
        self._made: dict[str, Path] = {}
        self._records: dict[str, Record] = {}
        self.root.mkdir(parents=True, exist_ok=True)
        if self.assets and not (self.root / "assets").exists():
            (self.root / "assets").symlink_to(self.assets)

    def record(self, name: str) -> Record:
        """What a command said and wrote; the same answer on every call."""
        if name not in self._records:
            self._records[name] = self._run(self.table[name])
        return self._records[name]

    def _place(self, source: str) -> Path:
        """Where something in braces is, made if it was not yet."""
        if source not in self._made:
            self._made[source] = self._make(source)
        return self._made[source]

    def _make(self, source: str) -> Path:
        if source == "assets":
            return self.root / "assets"
        if source.startswith("@"):
            other = self.table[source[1:]]
            assert self.record(other.name)["code"] == 0, f"{other.name}: failed, and {source} is asked for"
            out = self.root / "runs" / other.name / other.out
            return out if out.exists() else min(out.parent.glob(f"{out.stem}-00001-of-*.gguf"))
        if source.startswith("zoo:"):
            assert self.assets is not None
            return zoo(source[4:], self.assets, self.root / "zoo" / source[4:])
        (self.root / "sources").mkdir(exist_ok=True)
        return SOURCES[source](self.root / "sources" / source)

    def _run(self, command: Command) -> Record:
        folder = self.root / "runs" / command.name
        places = {source: os.path.relpath(self._place(source), folder) for source in command.sources}
        words = [re.sub(r"\{([^{}]+)\}", lambda match: places[match[1]], word) for word in command.words]
        if self.jobs and words[0] in WRITING:
            words += ["-j", str(self.jobs)]
        folder.mkdir(parents=True)
        planned = _in_folder(folder, [*words, "--dry-run"]).out if command.plan else ""
        assert not any(folder.iterdir()), f"{command.name}: --dry-run wrote something"
        ran = _in_folder(folder, words)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {
            "line": command.line,
            "code": ran.code,
            "stdout": self._text(f"{command.name}/stdout", ran.out),
            "stderr": self._text(f"{command.name}/stderr", ran.err),
            **({"plan": self._text(f"{command.name}/plan", planned)} if command.plan else {}),
            "files": {path.relative_to(folder).as_posix(): self._file(command, path) for path in files},
        }

    def _file(self, command: Command, path: Path) -> str:
        data = path.read_bytes()
        if path.suffix in BINARY:
            for place in filter(None, (self.root, self.assets)):
                assert str(place).encode() not in data, f"{command.name}: {path.name} holds {place}"
            return f"{len(data)} bytes, sha256 {hashlib.sha256(data).hexdigest()}"
        for source in command.sources:
            before = self._place(source) / path.name
            if before.is_file() and before.read_bytes() == data and "token" in path.name:
                return "as in the source"  # the library that wrote it there may space it otherwise one day
        name = path.relative_to(self.root / "runs").as_posix()
        return self._text(name, data.decode())

    def _text(self, name: str, text: str) -> str:
        text = self.masked(text)
        if self.texts and text:
            (self.texts / name).parent.mkdir(parents=True, exist_ok=True)
            (self.texts / name).write_text(text)
        return text if len(text.encode()) <= KEPT else summary(text)

    def masked(self, text: str) -> str:
        """A text without folders of this machine, seconds, and the release of qconvert."""
        for place, stands in ((self.root, "ROOT"), (self.assets, "ASSETS")):
            if place is not None:
                text = text.replace(str(place), stands)
        for pattern, stands in MASKS:
            text = re.sub(pattern, stands, text)
        return text


def _in_folder(folder: Path, words: Sequence[str]) -> Ran:
    """A command in a current folder, with a terminal of 80 columns and no setting of the caller's."""
    here, environment = Path.cwd(), dict(os.environ)
    try:
        os.chdir(folder)
        for key in [key for key in os.environ if key.startswith("QCONVERT_")]:
            del os.environ[key]
        os.environ["COLUMNS"] = "80"
        return qconvert(*words)
    finally:
        os.chdir(here)
        os.environ.clear()
        os.environ.update(environment)


# What is kept of a long text: its hash, and short ones of its parts, so that a difference has a place.


def parts(text: str) -> tuple[str, dict[str, str]]:
    """The keys of a JSON object with their values, or the lines of another text by their numbers from 1."""
    try:
        found = json.loads(re.sub(r'("seconds": )SECONDS', r"\g<1>0", text))
    except ValueError:
        found = None
    if isinstance(found, dict):
        return "keys", {key.replace(" ", "_"): json.dumps(value) for key, value in found.items()}
    return "lines", {str(number): line for number, line in enumerate(text.splitlines(), 1)}


def summary(text: str) -> str:
    """Size and hash of a text, and eight digits of the hash of every part (or a short value as it is)."""
    kind, found = parts(text)
    short = " ".join(f"{name}={_short(part)}" for name, part in found.items())
    return f"{len(text.encode())} bytes, sha256 {_digest(text)}, {kind} {short}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _short(part: str) -> str:
    return part if part and len(part) <= 24 and " " not in part else _digest(part)[:8]


def recorded_parts(kept: str) -> tuple[str, dict[str, str]]:
    """The kind of a `summary` and its short hashes; of another text, nothing."""
    match = re.fullmatch(r"\d+ bytes, sha256 \w{64}, (keys|lines) (.*)", kept)
    return (match[1], dict(pair.split("=", 1) for pair in match[2].split(" "))) if match else ("", {})


# Differences


def differences(recorded: Record, now: Record, texts: Path) -> list[str]:
    """What a reader has to know of two records of a command: empty where they agree."""
    found = []
    if recorded["code"] != now["code"]:
        found.append(f"exit code: recorded {recorded['code']}, now {now['code']}")
    said = ("stdout", "stderr", "plan")
    before = {key: recorded[key] for key in said if key in recorded} | recorded["files"]
    after = {key: now[key] for key in said if key in now} | now["files"]
    for name in sorted({*before, *after}):
        if name not in after:
            found.append(f"{name}: recorded, and not written now")
        elif name not in before:
            found.append(f"{name}: written now, and not recorded: {after[name]}")
        elif before[name] != after[name]:
            own = texts / name
            text = own.read_text() if own.is_file() else ""
            found += [f"{name} differs:", *_difference(before[name], after[name], text)]
    return found


def _difference(recorded: str, now: str, text: str) -> Iterator[str]:
    (kind, old), (other, new) = recorded_parts(recorded), recorded_parts(now)
    if old and kind == other:
        yield from _other_parts(kind, old, new, parts(text)[1])
    elif old or new or "sha256" in recorded:
        yield from (f"  recorded {recorded[:1500]}", f"  now      {(text or now)[:1500]}")
    else:
        lines = (recorded.splitlines(), now.splitlines())
        yield from difflib.unified_diff(*lines, "recorded", "now", lineterm="")


def _other_parts(
    kind: str, old: Mapping[str, str], new: Mapping[str, str], values: Mapping[str, str]
) -> Iterator[str]:
    if kind == "lines":  # whose numbers move where one is put between them
        gone = [number for number, short in old.items() if short not in new.values()]
        come = [number for number, short in new.items() if short not in old.values()]
        yield f"  lines {', '.join(gone) or 'none'} of the record are not there now"
    else:
        yield from (f"  {key}: recorded {old[key]}, and not there now" for key in old if key not in new)
        come = [key for key in new if old.get(key) != new[key]]
    for name in come[:20]:
        before = f"recorded {old[name]}, " if kind == "keys" and name in old else "not recorded, "
        yield f"  {name}: {before}now {values[name][:1500]}"
    if not come:
        yield "  what is there was recorded as well, in other spaces or another order"
