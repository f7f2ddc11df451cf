"""Several outputs of a model from one reading: each is, to the byte, that of a run of its own."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qconvert.convert.run_together import joined
from qconvert.core.protocols import Reader
from qconvert.formats.huggingface.folder import HFCheckpoint
from qconvert.formats.io import planned_files
from qconvert.ops.encode import EncodeBlocks
from tests.support.commands import failed, files_of, made, qconvert
from tests.support.crashes import KILLED, MOMENTS, calls_of, groups_of, journal_of, killed, running, tree
from tests.support.fake_hub import known
from tests.support.fake_hub import running as running_hub
from tests.support.models import tiny

HOW = ("-j", 1, "--max-memory", "2MB", "-q")
KILLS = 6


@pytest.fixture
def singles(here: Path) -> dict[str, bytes]:
    """What runs of their own write of the embedded model."""
    for bits in (4, 8):
        made("quantize", "embedded", "--bits", bits, "-o", here / "one" / f"embedded-int{bits}-g128")
    return tree(here / "one")


def test_folders_are_those_of_single_runs(singles: dict[str, bytes], here: Path) -> None:
    for how in ((), HOW):
        ran = qconvert("quantize", "embedded", "--bits", "4,8", "-o", here / "all", "--overwrite", *how)
        assert ran.code == 0 and tree(here / "all") == singles


def test_files_are_those_of_single_runs_with_statistics_too(here: Path) -> None:
    statistics = made("calibrate", "embedded", "--tokens", 128, "--window", 128, "-o", "stats")
    types = ("q4_k_m", "q6_k", "q8_0")
    for more in ((), ("--calibration", statistics)):
        for kind in types:
            made(
                "to-gguf",
                "embedded",
                "--type",
                kind,
                *more,
                "-o",
                here / "one" / f"{kind}.gguf",
                "--overwrite",
            )
        ran = qconvert(
            "to-gguf", "embedded", "--type", ",".join(types), *more, "-o", "all", "--overwrite", "-q"
        )
        assert ran.code == 0, ran.err
        for kind, out in zip(types, ran.out.split(), strict=True):
            assert Path(out).parent == Path("all") and kind.upper() in out
            assert Path(out).read_bytes() == (here / "one" / f"{kind}.gguf").read_bytes()


def test_rows_are_read_once_and_equal_units_are_made_once(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[tuple[str, int]] = Counter()
    made_of: Counter[str] = Counter()
    encode, rows_of, whole_of = EncodeBlocks.apply, Reader.read, HFCheckpoint.read_stacked

    def reading(self: Reader, tensor: Any, start: int, stop: int) -> Any:
        read.update((tensor.name, row) for row in range(start, stop))
        return rows_of(self, tensor, start, stop)

    def reading_whole(self: HFCheckpoint, kinds: Any) -> Any:
        read.update((name, row) for names in kinds for name in names for row in range(self.specs[name].rows))
        return whole_of(self, kinds)

    def encoding(self: EncodeBlocks, value: Any, *given: Any) -> Any:
        made_of[self.encoding.label] += value.arrays[0].size
        return encode(self, value, *given)

    made("to-gguf", "embedded", "--type", "q6_k", "-o", "warm.gguf")  # what warms kernels applies them, too
    monkeypatch.setattr(Reader, "read", reading)
    monkeypatch.setattr(HFCheckpoint, "read_stacked", reading_whole)
    made("to-gguf", "embedded", "--type", "q6_k", "-o", "one.gguf")
    alone = dict(read)
    assert set(alone.values()) == {1}
    read.clear()
    monkeypatch.setattr(EncodeBlocks, "apply", encoding)
    made("to-gguf", "embedded", "--type", "q6_k", "-o", "two.gguf")
    weights = made_of["q6_k"]
    read.clear()
    made_of.clear()
    ran = qconvert("to-gguf", "embedded", "--type", "q4_k_m,q6_k,q8_0", "-q")
    assert ran.code == 0 and dict(read) == alone
    assert 0 < made_of["q4_k"] < weights <= made_of["q6_k"] < 1.05 * weights  # zeros warm kernels twice


def test_blocks_that_read_other_rows_stay_apart() -> None:
    assert joined([[], []], lambda unit: (0, 0)) == []


def test_killed_at_any_call_it_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    call_of = ("quantize", "embedded", "--bits", "4,8", *HOW)
    with groups_of(200_000):
        assert qconvert(*call_of, "-o", tmp_path / "whole").code == 0
        whole = tree(tmp_path / "whole")
        calls, resumed = calls_of(running(*call_of, "-o", tmp_path / "count")), 0
        last = [(calls - back, "after") for back in (8, 5, 3, 2)]  # while outputs get their names
        every = [(call, moment) for call in range(calls) for moment in MOMENTS]
        for call, moment in [*random.Random(9).sample(every, KILLS), *last]:
            out = tmp_path / f"{call}{moment}"
            assert killed(running(*call_of, "-o", out), call, moment) in (KILLED, 0)
            names = (
                [path.name for path in out.iterdir() if "partial" not in path.name] if out.exists() else []
            )
            for name in names:  # what has its name is whole
                assert files_of(out / name) == files_of(tmp_path / "whole" / name)
            resumed += any(
                journal_of(out / name) is not None for name in ("embedded-int4-g128", "embedded-int8-g128")
            )
            if len(names) < 2:
                ran = qconvert(*call_of, "-o", out)
                assert ran.code == 0, ran.err
            assert tree(out) == whole
            shutil.rmtree(out)
        assert resumed


def test_what_a_killed_run_has_named_is_left_and_the_rest_goes_on(here: Path) -> None:
    call_of = ("quantize", "embedded", "--bits", "4,8", "-o", "o")
    made("quantize", "embedded", "--bits", 4, "-o", here / "o" / "embedded-int4-g128")
    failed(
        qconvert(*call_of),
        "o/embedded-int4-g128: already exists",
        "use --overwrite to replace it, --skip-existing to leave it if it is complete, or another output",
    )
    other = running("quantize", "embedded", "--bits", 8, *HOW, "-o", here / "o" / "embedded-int8-g128")
    with groups_of(200_000):
        assert killed(other, 40, "after") == KILLED
    assert (here / "o" / "embedded-int8-g128.partial").is_dir()
    ran = qconvert(*call_of)
    assert ran.code == 0 and ran.err.startswith("o/embedded-int4-g128: already complete, skipped\n")
    ran = qconvert(*call_of, "--skip-existing", "--json")
    assert [each["skipped"] for each in ran.json["outputs"]] == [True, True]
    assert qconvert("verify", *(here / "o").iterdir(), "-q").code == 0


def test_a_fault_of_one_output_leaves_none(models: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, data: Any, offset: int, name: str) -> None:
        raise OSError(28, "No space left on device", name)

    monkeypatch.setattr(planned_files, "write_exactly", full)
    ran = qconvert("quantize", models / "plain", "--bits", "4,8", "-o", "o", "-q")
    assert ran.code == 1 and "No space left" in ran.err
    assert not (here / "o").exists() or list((here / "o").iterdir()) == []


def test_several_models_json_and_dry_runs(models: Path, here: Path) -> None:
    names = ("plain", "untied")
    call_of = ("quantize", *(models / name for name in names), "--bits", "4,8", "-o", "o", "--json")
    outs = [f"o/{name}-int{bits}-g128" for name in names for bits in (4, 8)]
    planned = qconvert(*call_of, "--dry-run").json
    assert [each["out"] for each in planned["outputs"]] == outs and not (here / "o").exists()
    found = qconvert(*call_of).json
    assert found["ok"] and [each["out"] for each in found["outputs"]] == outs
    table = qconvert("to-gguf", models / "plain", "--type", "q8_0,f16", "--dry-run")
    assert table.out.count("total ") == 2 and table.err.count("dry run: nothing was written") == 1


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        ("to-gguf {m} --type q8_0,f16 -o m.gguf", "m.gguf: one file, and --type asks for several"),
        ("to-gguf {m} --type q8_0,nonsense", "nonsense"),
        ("quantize {m} --bits 4,9", "9 is not in the range"),
        ("quantize {m} --bits 4,", "--bits"),
        ("quantize {m} --bits 4,8 --scheme int4", "--scheme: given together with --bits"),
        ("quantize {m} --bits 4,8 --target-size 5bpw", "--bits: given together with a target"),
        ("quantize {m} --bits 4,8 --method feedback", "--method feedback: is measured on the layers before"),
        ("to-gguf {m} --type q8_0,q6_k --method awq", "--method awq: is measured on the layers before"),
    ],
)
def test_what_cannot_be_several_is_wrong_usage(call: str, fact: str, models: Path, here: Path) -> None:
    ran = qconvert(*call.format(m=models / "plain").split())
    assert ran.code == 2 and fact in ran.err and not list(here.iterdir())


def test_two_types_of_one_name_are_one(models: Path, here: Path) -> None:
    ran = qconvert("to-gguf", models / "plain", "--type", "q8_0,Q8_0", "-o", "m.gguf", "-q")
    assert (ran.code, ran.out) == (0, "m.gguf\n")


@pytest.fixture
def hub(here: Path) -> Iterator[Any]:
    folder = tiny(here / "m", "qwen3", shards=2, hidden_size=256, intermediate_size=1024, num_hidden_layers=2)
    with running_hub() as fake, known(fake, here / "cache"):
        fake.files = fake.add("org/m", folder)
        yield fake


def test_a_hub_model_is_fetched_once(hub: Any, here: Path) -> None:
    weights = sum(len(blob) for name, blob in hub.files.items() if name.endswith(".safetensors"))
    for bits in (4, 8):
        made("quantize", "org/m", "--bits", bits, "--group-size", 32, "-o", here / "one" / f"m-int{bits}-g32")
    before = hub.sent()
    found = qconvert(
        "quantize", "org/m", "--bits", "4,8", "--group-size", 32, "-o", here / "all", "--json"
    ).json
    assert [each["fetched"]["retries"] for each in found["outputs"]] == [0, 0]
    assert hub.sent() - before <= 1.02 * weights + 20_000
    assert tree(here / "all") == tree(here / "one")
