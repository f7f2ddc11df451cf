"""What a script can rely on: kinds of errors and whether to try again, signals at any moment, manifests."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qconvert.errors import NO_ROOM, DiskFull, QConvertError, refused
from qconvert.formats.io.local_file import require_free_disk
from tests.cli.test_errors import kinds
from tests.support.commands import files_of, made, qconvert

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "ci.md"


def kind_of(error: type[QConvertError]) -> str:
    """The name under which --json tells an error, spelled from its class by hand."""
    words = re.findall(r"QConvert|[A-Z][a-z]+", error.__name__)
    return "_".join(word.lower() for word in words)


def test_the_page_lists_every_kind_and_whether_to_try_again() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d) \| (yes|no) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    ours = [each for each in kinds() if each.__module__ == "qconvert.errors"]
    wanted = {(kind_of(each), str(each.exit_code), "yes" if each.retryable else "no") for each in ours}
    assert wanted <= set(rows)
    assert {kind for kind, _, again in rows if again == "yes"} == {
        "source_unavailable",
        "output_busy",
        "disk_full",
    }


def test_an_output_that_another_run_writes_is_worth_another_try(models: Path, here: Path) -> None:
    (here / "m.gguf.partial").touch()
    with (here / "m.gguf.partial").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ran = qconvert("to-gguf", models / "plain", "--type", "q8_0", "-o", "m.gguf", "--json")
    error = ran.json["error"]
    assert (ran.code, error["kind"], error["retryable"]) == (1, "output_busy", True)
    ran = qconvert("to-gguf", "nowhere", "--type", "q8_0", "--json")
    assert ran.json["error"]["retryable"] is False


@pytest.mark.parametrize("number", [*NO_ROOM, errno.EACCES])
def test_no_room_is_a_kind_of_its_own(number: int, tmp_path: Path) -> None:
    error = refused("m", OSError(number, os.strerror(number)))
    assert isinstance(error, DiskFull) == error.retryable == (number in NO_ROOM)
    with pytest.raises(DiskFull, match=r"needs 1000000000\.00 GB"):
        require_free_disk(tmp_path / "o", 10**18)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="this system has no /proc")
def test_what_is_no_disk_is_not_called_full(models: Path, here: Path) -> None:
    ran = qconvert("quantize", models / "plain", "--bits", 4, "-o", "/proc/x", "--json")
    assert ran.code == 1 and "free" not in ran.json["error"]["fact"] + ran.json["error"]["hint"]
    assert "/proc is not on a disk" in ran.json["error"]["fact"] and not ran.json["error"]["retryable"]


EARLY = """
import builtins, os, signal, sys
sys.argv = ["qconvert", "env"] + {words!r}
import qconvert.__main__ as entry
bare = builtins.__import__
def slow(name, *more):
    if name == "qconvert.cli":
        os.kill(os.getpid(), {signum})
    return bare(name, *more)
builtins.__import__ = slow
entry.main()
"""


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_signal_while_it_starts_is_one_line(kind: signal.Signals, code: int, words: list[str]) -> None:
    script = EARLY.format(words=words, signum=int(kind))
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code and "Traceback" not in done.stderr
    if words:
        error = json.loads(done.stdout)["error"]
        assert (error["kind"], error["exit_code"], error["retryable"]) == ("interrupted", code, True)
    else:
        assert (done.stdout, done.stderr) == ("", "Interrupted.\n")


def test_a_signal_in_a_command_that_reads_is_told_as_json(here: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "qconvert", "generate", "embedded", "-p", "-", "--json"]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True
    ) as process:
        time.sleep(1)  # it is importing, or waits for the prompt; both end alike
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 143 and json.loads(out)["error"]["kind"] == "interrupted"


def test_check_names_the_file_and_only_what_it_is_judged_by(models: Path, here: Path) -> None:
    made("to-gguf", models / "plain", "--type", "q8_0", "-o", "mine.gguf")
    found = qconvert("check", "mine.gguf", "--for", "vllm", "--json").json
    assert found["problems"][0]["subject"] == "mine.gguf" and {"tp", "device"} <= found.keys()
    assert not {"tp", "device"} & qconvert("check", "mine.gguf", "--for", "ollama", "--json").json.keys()
    assert (
        qconvert("check", models / "plain", "--json")
        .json["error"]["fact"]
        .startswith("Missing option '--for'. Choose from: vllm, ")
    )


def test_a_manifest_that_is_there_is_of_the_file_beside_it(models: Path, here: Path) -> None:
    """Overwritten without --manifest, a file would else be held against the hashes of the one before it."""
    call = ("to-gguf", models / "plain", "-o", "m.gguf", "--type")
    made(*call, "q8_0", "--manifest")
    first = json.loads((here / "m.qconvert.json").read_text())
    assert first["file_type"] == "Q8_0" and first["recipe"]["layout"] == "gguf"
    assert qconvert(*call, "q4_0", "--manifest").code == 1, "the file is there"
    made(*call, "q4_0", "--overwrite")
    assert sorted(files_of(here)) == ["m.gguf", "m.qconvert.json"]
    assert qconvert("verify", "m.gguf").code == 0
    (here / "m.qconvert.json").unlink()
    assert qconvert("verify", "m.gguf", "--json").json["verdict"] == "unrecorded"


def test_of_a_damaged_gguf_the_tensor_is_named(models: Path, here: Path) -> None:
    parts = made("to-gguf", models / "plain", "--type", "q8_0", "--split-max-size", "100KB", "--manifest")
    assert qconvert("verify", parts).code == 0
    last = sorted(here.glob("*.gguf"))[-1]
    raw = last.read_bytes()
    last.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    problems = qconvert("verify", parts, "--json").json["problems"]
    assert f"{last.name}: its SHA-256 is not the manifest's" in problems and len(problems) == 2


def test_a_report_that_is_written_says_nothing_beside_its_json(models: Path, here: Path) -> None:
    call = ("eval", "weights", models / "plain", models / "quantized", "-o", "r")
    assert qconvert(*call).err.count("wrote ") == 3
    assert qconvert(*call, "--json").err == "" == qconvert(*call, "-q").err


def test_a_card_says_what_was_not_run(models: Path, here: Path) -> None:
    out = made("quantize", models / "plain", "--bits", 4, "--layout", "gptq", "-o", "o")
    card = (out / "README.md").read_text()
    assert "GPTQ names how the codes are stored. No GPTQ was run: weights are rounded to nearest." in card
    carried = made("convert", out, "--to", "gptq_v2", "-o", "p")
    assert "was run" not in (carried / "README.md").read_text(), "whose codes are those of the source"
    plain = made("quantize", models / "plain", "--bits", 4, "-o", "q")
    assert "was run" not in (plain / "README.md").read_text()


def test_a_symmetric_scheme_in_mlx_is_told_what_it_costs(models: Path, here: Path) -> None:
    call = ("convert", models / "plain", "--to", "mlx", "--scheme")
    said = qconvert(*call, "int4-g64", "-o", "a").err
    assert "mlx stores a minimum for each group" in said and "int4-asym-g64 loses less" in said
    assert "stores a minimum" not in qconvert(*call, "int4-asym-g64", "-o", "b").err
