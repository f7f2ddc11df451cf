"""What a run appends to --events: every line valid, in order, whatever ends the run."""

from __future__ import annotations

import json
import signal
import time
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT202012

from qconvert.checkpoint import network
from qconvert.cli import events
from qconvert.convert import runner
from tests.cli.test_json_schemas import SCHEMAS, schema_of
from tests.support.commands import made, qconvert, strict_json
from tests.support.crashes import KILLED, groups_of, killed, running
from tests.support.fake_hub import Answer, known
from tests.support.fake_hub import running as running_hub
from tests.support.models import tiny

SLOW = ("-j", 1, "--max-memory", "2MB", "-q")


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is told of at every block."""
    monkeypatch.setattr(events, "EVERY", 0.0)


def told(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, which the schema allows."""
    known_ = {each.name: Resource(schema_of(each.name), DRAFT202012) for each in SCHEMAS.glob("*.json")}
    validator = Draft202012Validator(
        schema_of("events.json"), registry=Registry().with_resources(known_.items())
    )
    lines = [strict_json(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        assert validator.is_valid(line), f"{line}: {[error.message for error in validator.iter_errors(line)]}"
    return lines


def kinds(lines: list[dict[str, Any]]) -> str:
    """The events in their order, those that follow one of their kind left out."""
    return " ".join(kind for kind, _ in groupby(line["event"] for line in lines))


def test_a_run_is_told_from_its_start_to_its_end(here: Path) -> None:
    call = ("quantize", "embedded", "--bits", 4, "-o", "o", "--events", "e.jsonl")
    found = qconvert(*call, "--json").json
    lines = told(here / "e.jsonl")
    assert kinds(lines) == "start progress file end"
    start, *progress, file, end = lines
    assert (start["source"], start["outputs"][0]["path"]) == ("embedded", "o")
    last = progress[-1]
    done = {"read": last["bytes_read"], "written": last["bytes_written"], "verified": last["bytes_verified"]}
    assert done == start["bytes"] and last["seconds_left"] == 0 and last["stage"] == "verify"
    assert file["bytes"] == start["outputs"][0]["files"][0]["bytes"]
    record = json.loads((here / "o" / "qconvert.json").read_text())
    assert file["sha256"] == record["files"][0]["sha256"]
    assert end["ok"] and end["seconds_by_stage"] == found["seconds_by_stage"]
    assert sum(found["seconds_by_stage"].values()) <= found["seconds"] + 0.01
    assert end["peak_memory"] > 20e6  # asked of the system twice, so that the later one may be larger
    assert found["peak_memory"] == pytest.approx(end["peak_memory"], rel=0.01)


def test_runs_are_appended_and_one_that_fails_says_why(models: Path, here: Path) -> None:
    call = ("to-gguf", models / "plain", "--type", "q8_0,f16", "--events", "e.jsonl", "-q")
    assert qconvert(*call, "--no-verify").code == 0
    lines = told(here / "e.jsonl")
    assert kinds(lines) == "start progress file end" and len(lines[0]["outputs"]) == 2
    assert [line["sha256"] for line in lines if line["event"] == "file"] == [None, None]
    weights = models / "plain" / "model.safetensors"
    broken = here / "broken"
    broken.mkdir()
    for path in (models / "plain").iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    data = bytearray(weights.read_bytes())
    data[-2:] = b"\xff\x7f"  # NaN in bfloat16
    (broken / weights.name).write_bytes(data)
    ran = qconvert("quantize", broken, "--bits", 4, "--events", "e.jsonl", "--json")
    *_, end = told(here / "e.jsonl")
    assert ran.code == 1 and not end["ok"] and end["error"] == ran.json["error"]


def test_what_goes_on_says_so(here: Path) -> None:
    call = ("quantize", "embedded", "--bits", "4,8", *SLOW, "--events", here / "e.jsonl", "-o", here / "o")
    with groups_of(200_000):
        assert killed(running(*call), 150, "after") == KILLED
        assert qconvert(*call).code == 0
    lines = told(here / "e.jsonl")
    assert kinds(lines) == "start progress start resume progress resume progress file end"
    partial = [line["partial"] for line in lines if line["event"] == "resume"]
    assert [Path(each).name for each in partial] == [f"embedded-int{b}-g128.partial" for b in (4, 8)]
    assert all(0 < line["share"] < 1 for line in lines if line["event"] == "resume")


def test_a_signal_is_the_end(models: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say = events.Events.say

    def signalled(self: events.Events, event: str, **fields: Any) -> None:
        say(self, event, **fields)
        if event == "progress":
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(events.Events, "say", signalled)
    ran = qconvert("fuse", models / "plain", "--events", "e.jsonl", "-q")
    *_, end = told(here / "e.jsonl")
    assert ran.code == 143 and (end["ok"], end["stopped"]) == (False, 143)


def test_what_is_asked_again_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network.random, "uniform", lambda a, b: 0.0)
    with running_hub() as hub, known(hub, here / "cache"):
        hub.add("org/m", tiny(here / "m", "qwen3", hidden_size=256, intermediate_size=1024, shards=4))
        hub.fault = lambda number: Answer(503) if number > 4 and number % 2 else None
        made("quantize", "org/m", "--bits", 4, "--group-size", 32, "--events", "e.jsonl")
    retries = [line["reason"] for line in told(here / "e.jsonl") if line["event"] == "retry"]
    assert retries and "503" in retries[0]


def test_a_file_that_cannot_be_written_is_an_error_before_anything_is(models: Path, here: Path) -> None:
    ran = qconvert("fuse", models / "plain", "--events", "nowhere/e.jsonl", "-o", "o")
    assert ran.code == 1 and "nowhere/e.jsonl" in ran.err and list(here.iterdir()) == []


def test_every_line_names_its_run_and_a_skipped_output_has_one(here: Path) -> None:
    call = ("quantize", "embedded", "--bits", 4, "-o", "o", "--events", "e.jsonl", "-q")
    made(*call)
    made(*call[:5], "p", *call[6:])
    assert qconvert(*call, "--skip-existing").code == 0
    runs = [
        (run, kinds(list(lines))) for run, lines in groupby(told(here / "e.jsonl"), lambda line: line["run"])
    ]
    assert [said for _, said in runs] == ["start progress file end", "start progress file end", "skipped"]
    assert len({run for run, _ in runs}) == 3
    assert told(here / "e.jsonl")[-1]["path"] == "o"


def test_a_file_that_takes_no_line_is_named(here: Path) -> None:
    ran = qconvert("quantize", "embedded", "--bits", 4, "-o", "o", "--events", "/dev/full", "--json")
    error = ran.json["error"]
    assert (ran.code, error["kind"]) == (1, "disk_full")
    assert error["fact"] == "/dev/full: cannot be written: No space left on device"
    assert not (here / "o").exists()


# What writes no output

CALIBRATED = ("--text", "text.txt", "--tokens", 512, "--window", 64)


@pytest.fixture
def text(here: Path) -> Path:
    (here / "text.txt").write_text("def f(x):\n    return x + 1\n" * 200, encoding="utf-8")
    return here / "text.txt"


def stages(path: Path) -> list[tuple[str, list[dict[str, Any]]]]:
    """The stage and the lines of every run that writes no output; each is told from nothing to all of it."""
    lines = told(path)
    names = dict.fromkeys(line["run"] for line in lines)
    runs = [[line for line in lines if line["run"] == name] for name in names]
    found = [run for run in runs if run[0]["event"] == "stage"]
    for run in found:
        *between, end = run
        assert kinds(run) == "stage end" and end["ok"] and len(between) > 2
        assert (between[0]["done"], between[0]["total"], between[0]["seconds_left"]) == (0, None, None)
        assert between[-1]["done"] == between[-1]["total"] > 0 and between[-1]["seconds_left"] == 0
        done = [line["done"] for line in between]
        assert done == sorted(done)
    return [(run[0]["stage"], run) for run in found]


def test_a_text_that_is_read_for_prices_and_what_is_measured_are_told(here: Path, text: Path) -> None:
    call = ("quantize", "embedded", "--target-size", "8.5bpw", "--schemes", "int4-g32,int8-g32", *CALIBRATED)
    made(*call, "-o", "o", "--events", "e.jsonl", "-q")
    assert [stage for stage, _ in stages(here / "e.jsonl")] == ["weigh", "measure"]
    assert kinds(told(here / "e.jsonl")) == "stage end stage end start progress file end"


def test_statistics_and_perplexity_are_told(here: Path, text: Path) -> None:
    assert qconvert("calibrate", "embedded", *CALIBRATED, "-o", "s", "--events", "e.jsonl", "-q").code == 0
    call = ("eval", "perplexity", "embedded", "--text", "text.txt", "--context", 64, "--events", "e.jsonl")
    assert qconvert(*call, "-q").code == 0
    (first, ran), (second, scored) = stages(here / "e.jsonl")
    assert (first, second) == ("calibrate", "evaluate")
    assert (ran[0]["unit"], scored[0]["unit"], scored[0]["models"]) == ("pass", "window", ["embedded"])


def test_weights_that_are_compared_are_told(here: Path, text: Path) -> None:
    """Alone, and for the report of perplexities, where they are a run after the windows."""
    made("quantize", "embedded", "--bits", 8, "-o", "o")
    ran = qconvert("eval", "weights", "embedded", "o", "--events", "e.jsonl", "--json")
    assert ran.code == 0, ran.err
    ((stage, run),) = stages(here / "e.jsonl")
    assert (stage, run[0]["unit"], run[0]["models"]) == ("compare", "weight", ["embedded", "o"])
    assert run[-2]["total"] == qconvert("inspect", "embedded", "--json").json["parameters"]
    call = ("eval", "perplexity", "o", "--reference", "embedded", "--text", "text.txt", "--context", 64)
    assert qconvert(*call, "-o", "r", "--events", "f.jsonl", "-q").code == 0
    assert [stage for stage, _ in stages(here / "f.jsonl")] == ["evaluate", "compare"]
    assert qconvert("eval", "weights", "embedded", "nowhere", "--events", "g.jsonl").code == 1
    end = told(here / "g.jsonl")[-1]
    assert not end["ok"] and "nowhere" in end["error"]["fact"]


def test_a_stage_that_fails_or_is_interrupted_says_so(
    here: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ("eval", "perplexity", "embedded", "--text", "text.txt", "--context", 64, "--events", "e.jsonl")
    assert qconvert(*call, "--reference", "nowhere").code == 1
    end = told(here / "e.jsonl")[-1]
    assert not end["ok"] and "nowhere" in end["error"]["fact"]
    text.write_text(text.read_text(encoding="utf-8") * 6, encoding="utf-8")  # several batches
    say, raised = events.StageLines.say_progress, list[bool]()

    def interrupted(self: events.StageLines) -> None:
        say(self)
        if self._done and not raised:
            raised.append(True)
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(events.StageLines, "say_progress", interrupted)
    assert qconvert(*call, "-o", "r").code == 143
    end = told(here / "e.jsonl")[-1]
    assert (end["ok"], end["stopped"]) == (False, 143)


def test_silence_is_told(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that says nothing of itself, and a run whose blocks are slow, have lines all the same."""
    monkeypatch.setattr(events, "SILENT", 0.05)
    with events.stage_to(here / "e.jsonl", "weigh", ["m"], "pass"):
        time.sleep(0.5)
    assert len(told(here / "e.jsonl")) > 5
    make, model = runner._make, tiny(here / "model", num_hidden_layers=1)
    monkeypatch.setattr(runner, "_make", lambda *args: (time.sleep(0.2), make(*args))[1])
    made("quantize", model, "--bits", 4, "-o", "o", "--events", "f.jsonl", *SLOW)
    lines = told(here / "f.jsonl")
    blocks = len({line["bytes_read"] for line in lines if line["event"] == "progress"})
    assert sum(line["event"] == "progress" for line in lines) > 2 * blocks
