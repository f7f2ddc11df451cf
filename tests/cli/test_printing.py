"""No command prints what a terminal would obey, whatever a checkpoint holds."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from qconvert.cli import COMMANDS
from qconvert.cli.printing import EscapingStream, bare, escaped, escaping
from qconvert.core.ggml_types import KV
from tests.support.commands import Ran, qconvert
from tests.support.gguf_models import write_gguf
from tests.support.hostile_files import sound_gguf
from tests.support.models import tiny

# A title of the terminal, colours, a line that overwrites itself, letters that run backwards.
EVIL = "\x1b]0;owned\x07\x1b[31m\rx\u202ey\u2028z\x9b2J\u2066"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def evil_folder(folder: Path, **changes: object) -> Path:
    """A sound model with such characters in every text that it has: a tensor, files, configs, metadata."""
    said = {"architectures": [f"Qwen3{EVIL}"], "_name_or_path": EVIL, "transformers_version": EVIL}
    model = tiny(folder, **{**said, **changes})  # type: ignore[arg-type]
    (model / f"notes{EVIL}.txt").write_text("x")
    (model / f"modeling{EVIL}.py").write_text("x")
    (model / "README.md").write_text(f'---\nlicense: "{EVIL.encode("unicode_escape").decode()}"\n---\n')
    settings = {"tokenizer_class": EVIL, "version": EVIL, "chat_template": EVIL}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    raw = (model / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header = json.dumps({"__metadata__": {EVIL: EVIL}, **header}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    return model


def renamed(model: Path) -> Path:
    """The model with a tensor of such a name."""
    path = model / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b'"model.norm.weight"', json.dumps(f"model.{EVIL}").encode())
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    return model


def evil_gguf(path: Path) -> Path:
    keys, tensors = sound_gguf()
    evil = [KV.text(f"general.{EVIL}", EVIL), KV.text("general.license", EVIL)]
    kept = [entry for entry in keys if entry.key not in ("general.license", "general.name")]
    return write_gguf(path, [*kept, KV.text("general.name", EVIL), *evil], list(tensors))


def harmless(ran: Ran, words: object) -> None:
    found = OBEYED.search(ran.out + ran.err)
    assert not found, (words, ran)
    assert "this is a bug" not in ran.err, (words, ran)


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("evil")
    return {
        "folder": evil_folder(folder / f"m{EVIL}"),
        "tensor": renamed(evil_folder(folder / "tensor")),
        "type": evil_folder(folder / "type", model_type=f"a{EVIL}"),
        "gguf": evil_gguf(folder / "m.gguf"),
    }


# What each command is given beside a model; a word None stands for the model.
WORDS: dict[str, list[list[str | None]]] = {
    "inspect": [[None], [None, "--tensors"], [None, "--metadata"], [None, "--json"]],
    "check": [[None, "--for", "vllm"], [None, "--for", "transformers", "--json"]],
    "verify": [[None], [None, "--json"]],
    "diff": [[None, None], [None, "embedded"]],
    "generate": [[None, "-p", "a\x1b[31m", "-n", "2"], [None, "-p", EVIL, "--chat", "-n", "2"]],
    "eval": [[None, "--text", "no such\x1b file"]],
    "bench": [[None, "--device", EVIL]],
    "calibrate": [[None, "--text", EVIL, "-o", "out"]],
    "quantize": [[None, "--bits", "8", "--dry-run"], [None, "--recipe", EVIL], [None, "--bits", EVIL]],
    "convert": [[None, "--to", "awq", "--dry-run"], [None, "--to", EVIL]],
    "to-gguf": [[None, "--type", "q8_0", "--dry-run"], [None, "--type", EVIL]],
    "demo": [[EVIL]],
    "env": [[EVIL]],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_prints_what_a_terminal_obeys(name: str, evil: dict[str, Path], here: Path) -> None:
    for words in WORDS.get(name, [[None, "--dry-run"], [None, "-o", "out"], [None, "-o", EVIL, "-q"]]):
        for model in evil.values():
            said = [name, *(model if word is None else word for word in words)]
            harmless(qconvert(*said), said)


# Words of what writes elsewhere, or tells another program; {} stands for such characters.
ELSEWHERE = (
    "quantize {m} --bits 8 -o out --overwrite --events events.jsonl --json",
    "quantize {m} --bits 8 -o out{} --events events{}.jsonl",
    "quantize {m} --bits 8 -o s3://b{}/x --dry-run",
    "convert {m} --to awq -o gs://b/{} --json",
    "quantize {m} --bits 8 -o out --overwrite --push-to a/b{} --json",
    "quantize {m} --bits 8 -o out --overwrite --push-to {}",
    "inspect s3://b{}/x --json",
    "inspect https://a.invalid/{}",
    "verify hf://a/{}",
    "bench {m} --device {} --json",
)


@pytest.mark.parametrize("words", ELSEWHERE)
def test_names_elsewhere_and_events_are_escaped(words: str, tmp_path: Path, here: Path) -> None:
    model = evil_folder(tmp_path / f"m{EVIL}", architectures=["Qwen3ForCausalLM"], num_hidden_layers=1)
    said = [word.replace("{m}", str(model)).replace("{}", EVIL) for word in words.split()]
    ran = qconvert(*said)
    harmless(ran, said)
    assert "--json" not in said or isinstance(ran.json, dict)
    for file in here.glob("*.jsonl"):
        text = file.read_text(encoding="utf-8")
        assert not OBEYED.search(text) and all(
            isinstance(json.loads(line), dict) for line in text.splitlines()
        )
    if "--events" in said:
        assert ran.code == 0 and list(here.glob("*.jsonl")), ran


@pytest.mark.parametrize("of_ranks", [{"RANK": EVIL, "WORLD_SIZE": "2"}, {"RANK": "0", "WORLD_SIZE": EVIL}])
def test_the_environment_of_ranks_is_escaped(
    of_ranks: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, here: Path
) -> None:
    for name, value in of_ranks.items():
        monkeypatch.setenv(name, value)
    ran = qconvert("quantize", tiny(tmp_path / "m"), "--bits", "8", "-o", "out", "--json")
    harmless(ran, of_ranks)


def test_errors_of_a_command_line_are_escaped(here: Path) -> None:
    for words in ([EVIL], ["inspect", f"--{EVIL}"], ["inspect", EVIL], ["inspect", EVIL, "--json"]):
        harmless(qconvert(*words), words)


def test_what_is_escaped_and_what_is_not() -> None:
    kept = "tab\there\nüber 東京 👩\u200d🔬 \\u001b"
    assert escaped(kept) == kept
    assert escaped("\x1b\r\x7f\x9b\u202e\u2028\udcff") == "\\u001b\\u000d\\u007f\\u009b\\u202e\\u2028\\udcff"
    assert json.loads(escaped('"\x7f\u2028"')) == "\x7f\u2028"
    assert OBEYED.search(escaped("".join(map(chr, range(0x3000))))) is None


def test_the_streams_are_their_own_again(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with escaping():
        print("\x1b")
        bare(sys.stdout).write("\r")
        assert isinstance(sys.stdout, EscapingStream) and not sys.stdout.isatty()
        with pytest.raises(TypeError):
            sys.stdout.write(b"")  # type: ignore[arg-type]
    assert sys.stdout is out and out.getvalue() == "\\u001b\n\r"
