"""What every command prints under --json, against the schemas in docs/reference/schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012
from safetensors import safe_open

from qconvert.cli import COMMANDS
from qconvert.evaluate import perplexity
from tests.support.adapters import lora_arrays, write_peft
from tests.support.commands import made, qconvert
from tests.support.forked_python import fork_models

SCHEMAS = Path(__file__).resolve().parents[2] / "docs" / "reference" / "schemas"
PARTS = {"common.json", "error.json", "events.json"}
"""What the schemas of commands refer to, and that of --events (test_events.py)."""
# A schema, what is called, and the exit code.
CALLS = [
    ("inspect", "inspect {plain} --tensors --metadata", 0),
    ("inspect", "inspect {plain}/config.json", 0),
    ("inspect", "inspect {plain} {quantized}", 0),
    ("inspect", "inspect {gguf} --metadata", 0),
    ("inspect", "inspect nowhere", 1),
    ("calibrate", "calibrate embedded --tokens 256 --window 128 -o stats", 0),
    ("calibrate", "calibrate {plain} --merge nowhere -o stats", 1),
    ("conversion", "quantize {plain} --bits 4", 0),
    ("conversion", "quantize {plain} --bits 4 --dry-run", 0),
    ("conversion", "quantize {plain} {untied} --bits 4 -o folder", 0),
    ("conversion", "quantize {plain} {untied} {quantized} --bits 4 -o folder", 1),
    ("conversion", "quantize {quantized} --bits 4", 1),
    ("conversion", "quantize {plain} --bits 4,8 -o several", 0),
    ("conversion", "quantize {plain} --bits 9", 2),
    (
        "conversion",
        "quantize {plain} --target-size 9bpw --tokens 128 --window 64 --text {text} -o sized",
        0,
    ),
    (
        "conversion",
        "quantize {plain} --bits 4 --method feedback --tokens 128 --window 64 --text {text} -o fed",
        0,
    ),
    ("conversion", "fuse-qkv {plain}", 0),
    ("conversion", "fuse {plain} --only gate_up", 0),
    ("conversion", "unfuse {fused}", 0),
    ("conversion", "tie {untied}", 0),
    ("conversion", "untie {plain}", 0),
    ("conversion", "merge {adapter} -o merged", 0),
    ("inspect", "inspect {adapter}", 0),
    ("conversion", "dequantize {quantized}", 0),
    ("conversion", "convert {quantized} --to mlx --allow-requantize", 0),
    ("conversion", "convert {plain} --to gguf -o c.gguf", 0),
    ("conversion", "convert {plain} --to mlx --scheme int9", 2),
    ("conversion", "to-gguf {plain} --type q8_0", 0),
    ("conversion", "to-gguf {plain} --type q8_0 --dry-run", 0),
    ("conversion", "to-gguf {plain} --type q8_0,q6_k --dry-run", 0),
    ("conversion", "to-gguf {plain} --type nonsense", 2),
    ("conversion", "from-gguf {gguf} -o back", 0),
    ("types", "to-gguf --type list", 0),
    ("check", "check {plain} --for mlx", 0),
    ("check", "check {quantized} --for llama.cpp", 3),
    ("check", "check {plain} {quantized} --for llama.cpp", 3),
    ("check", "check nowhere --for mlx", 1),
    ("verify", "verify {quantized} --against {plain}", 0),
    ("verify", "verify {quantized} {plain}", 3),
    ("verify", "verify {quantized} nowhere", 1),
    ("verify", "verify {quantized} nowhere --keep-going", 1),
    ("check", "check {plain} nowhere --for ollama", 1),
    ("check", "check {plain}", 2),
    ("inspect", "inspect {plain} nowhere", 1),
    ("bench", "bench {plain} nowhere -p 1 -n 0 -r 1 -j 1", 1),
    ("conversion", "to-gguf {plain} {untied} --type q8_0 --manifest --keep-going", 0),
    ("conversion", "quantize {plain} {quantized} nowhere --bits 4 -o folder --keep-going", 1),
    ("verify", "verify {plain} --against {quantized}", 3),
    ("diff", "diff {plain} {quantized} --all", 0),
    ("diff", "diff {plain} {quantized} --exit-code", 3),
    ("generate", "generate {plain} -p hi -n 2", 0),
    ("generate", "generate {plain} -p hi -n 0", 2),
    ("eval-perplexity", "eval perplexity {plain} --text {text} --context 64 --chunks 2", 0),
    (
        "eval-perplexity",
        "eval perplexity {quantized} --reference {plain} --text {text} --text {other} --context 64 "
        "--chunks 2 --noise-floor --samples -o report",
        0,
    ),
    (
        "eval-perplexity",
        "eval perplexity {quantized} --reference {untied} --text {text} --context 64 --chunks 2"
        " --fail-above-kl 0",
        3,
    ),
    ("eval-perplexity", "eval perplexity {plain} --text {text} --fail-above 1", 2),
    ("eval-weights", "eval weights {plain} {quantized}", 0),
    ("eval-weights", "eval weights {plain} nowhere", 1),
    ("bench", "bench {plain} -p 4 -n 2 -r 1 -j 1", 0),
    ("bench", "bench {plain} -p 0 -n 0", 2),
    ("env", "env", 0),
]


def schema_of(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def registry() -> Registry:
    """The schemas under their file names, which are how they refer to one another."""
    found = {p.name: Resource(schema_of(p.name), DRAFT202012) for p in SCHEMAS.glob("*.json")}
    return Registry().with_resources(found.items())


@pytest.fixture(scope="module")
def words(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models by name, a GGUF, an adapter, and two texts."""
    folder = tmp_path_factory.mktemp("schemas")
    found = {path.name: path for path in models.iterdir()}
    found["gguf"] = made("to-gguf", models / "plain", "--type", "q8_0", "-o", folder / "m.gguf")
    module = "model.layers.0.self_attn.q_proj"
    with safe_open(models / "plain" / "model.safetensors", "np") as file:
        shape = tuple(file.get_slice(f"{module}.weight").get_shape())
    found["adapter"] = write_peft(folder / "lora", lora_arrays({module: shape}, 4), models / "plain")
    for name in ("text", "other"):
        found[name] = folder / f"{name}.txt"
        found[name].write_text(
            f"{name}: the quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8"
        )
    return found


def problems(found: Any, name: str, registry: Registry) -> list[str]:
    validator = Draft202012Validator(schema_of(f"{name}.json"), registry=registry)
    return [_deepest(error) for error in validator.iter_errors(found)]


def _deepest(error: Any) -> str:
    """The reasons that alternatives do not fit, which `anyOf` keeps to itself."""
    inner = "; ".join(f"{each.json_path}: {each.message[:300]}" for each in error.context)
    return f"{error.json_path}: {inner or error.message[:300]}"


@pytest.mark.parametrize(("name", "call", "code"), CALLS, ids=[f"{call}" for _, call, _ in CALLS])
def test_what_is_printed_is_valid(
    name: str, call: str, code: int, words: dict[str, Path], registry: Registry, here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    fork_models(monkeypatch)
    ran = qconvert(*(word.format(**words) for word in call.split()), "--json")
    assert ran.code == code, ran.out[:2000] + ran.err
    assert ran.out.count("\n") == 1 and ran.json["ok"] == (code == 0)
    assert problems(ran.json, name, registry) == []
    if code in (1, 2):
        assert problems({"schema": 1, "ok": False, "error": ran.json["error"]}, "error", registry) == []
        assert not any(char in ran.json["error"]["fact"] for char in "\t\n")


def test_every_command_and_every_schema_is_tried() -> None:
    called = {call.split()[0] for _, call, _ in CALLS}
    assert called == COMMANDS.keys() - {"demo", "completion"}  # see below; a script is no JSON
    named = {f"{name}.json" for name, _, _ in CALLS} | PARTS | {"demo.json"}
    assert named == {path.name for path in SCHEMAS.iterdir()}


def test_what_the_demo_prints_is_valid(
    registry: Registry, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On windows of 64 tokens, which take a moment."""
    monkeypatch.setattr(perplexity, "run", partial(perplexity.run, context=64))
    found = qconvert("demo", "--chunks", 2, "--json").json
    assert found["ok"] and problems(found, "demo", registry) == []


def test_the_schemas_are_schemas_and_close_their_objects() -> None:
    for path in SCHEMAS.glob("*.json"):
        schema = schema_of(path.name)
        Draft202012Validator.check_schema(schema)
        assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"] and schema["description"]


@pytest.mark.parametrize(
    ("name", "call", "broken"),
    [
        ("inspect", "inspect {plain}", {"layers": "one"}),
        ("inspect", "inspect {plain}", {"surprise": 1}),
        ("conversion", "fuse {plain} --dry-run", {"output": {}}),
        ("check", "check {plain} --for mlx", {"verdict": "perhaps"}),
        ("env", "env", {"cores": "2"}),
    ],
)
def test_what_is_not_promised_is_not_valid(
    name: str, call: str, broken: dict[str, Any], words: dict[str, Path], registry: Registry, here: Path
) -> None:
    found = qconvert(*(word.format(**words) for word in call.split()), "--json").json
    assert problems(found, name, registry) == [] and problems(found | broken, name, registry) != []


def _links(text: str) -> Iterator[str]:
    for part in text.split("](")[1:]:
        yield part.partition(")")[0]


def test_the_page_about_scripts_links_every_schema() -> None:
    page = SCHEMAS.parents[1] / "how-to" / "ci.md"
    linked = {link for link in _links(page.read_text(encoding="utf-8")) if "schemas/" in link}
    assert linked == {f"../reference/schemas/{path.name}" for path in SCHEMAS.iterdir()}


def test_every_schema_has_a_name_and_an_example_that_it_allows(registry: Registry) -> None:
    for path in SCHEMAS.glob("*.json"):
        schema = schema_of(path.name)
        assert schema["$id"] == path.name, "by which the others refer to it"
        assert "examples" in schema or path.name in ("common.json", "demo.json")  # parts; a long report
        for example in schema.get("examples", ()):
            assert problems(example, path.stem, registry) == []
