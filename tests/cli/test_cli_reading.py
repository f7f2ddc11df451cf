"""The options of the commands that only read, what -q and --json leave on stdout, and the environment."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qconvert.cli import COMMANDS, progress
from qconvert.cli.conversion_report import GGUFReport, certificate_line, report_of
from qconvert.cli.env import PACKAGES
from qconvert.cli.options import available_cores
from qconvert.convert.manifest import Certificates
from qconvert.convert.time_left import Work
from tests.support.commands import made, qconvert, strict_json
from tests.support.models import EMBED, HEAD, stored

Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def gguf(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made("to-gguf", models / "plain", "--type", "q8_0", "-o", tmp_path_factory.mktemp("g") / "m.gguf")


JSON_KEYS = {
    "inspect {plain}": {"schema", "model", "family", "layers", "tied", "quantization", "warnings", "from"},
    "check {plain} --for vllm": {"schema", "model", "for", "tp", "problems"},
    "verify {quantized}": {"schema", "model", "problems", "warnings", "tensors"},
    "diff {plain} {fused}": {"schema", "a", "b", "summary", "tensors"},
    "env": {"schema", "qconvert", "python", "cuda", "cores"},
    "fuse {plain} --dry-run": {"schema", "dry_run", "out", "source", "output", "recipe", "warnings"},
    "fuse {plain} -o out": {"schema", "dry_run", "out", "seconds", "totals", "verified", "output"},
    "to-gguf {plain} --type q8_0 --dry-run": {
        "schema",
        "out",
        "types",
        "parameters",
        "bytes",
        "kept",
        "sha256",
    },
    "to-gguf {plain} --type q8_0 -o m.gguf": {"schema", "file_type", "types", "certificates", "sha256"},
    "eval weights {plain} {quantized}": {"schema"},
    "generate {plain} -p hi -n 2": {
        "schema",
        "text",
        "prompt_tokens",
        "tokens",
        "context_full",
        "model",
        "asked",
    },
}


@pytest.mark.parametrize("call", JSON_KEYS)
def test_json_is_one_object_with_the_promised_keys(call: str, models: Path, here: Path) -> None:
    words = [word.format(**{p.name: p for p in models.iterdir()}) for word in call.split()]
    ran = qconvert(*words, "--json")
    found = strict_json(ran.out)
    assert ran.code == 0 and ran.out.count("\n") == 1 and found["schema"] == 1
    assert JSON_KEYS[call] <= found.keys()


@pytest.mark.parametrize("call", JSON_KEYS)
def test_quiet_leaves_stderr_to_warnings(call: str, models: Path, here: Path) -> None:
    words = [word.format(**{p.name: p for p in models.iterdir()}) for word in call.split()]
    ran = qconvert(*words, "-q")
    assert ran.code == 0, ran.err
    assert all(line.startswith(("Warning: ", " ", "  ")) for line in ran.err.splitlines())
    if words[0] in ("fuse", "to-gguf"):
        assert len(ran.out.splitlines()) == 1
    if words[0] == "verify":
        assert ran.out == ""


@pytest.mark.parametrize(
    "command", [name for name in COMMANDS if name not in ("demo", "env", "eval", "to-gguf")]
)
def test_a_command_without_its_model_is_wrong_usage(command: str) -> None:
    for extra in ((), ("--json",)):
        ran = qconvert(command, *extra)
        assert ran.code == 2
    assert strict_json(ran.out)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    "call",
    [
        "quantize m --bits 9",
        "quantize m --bits 1",
        "quantize m --group-size 48",
        "quantize m --bits 4 --jobs 0",
        "fuse m --only heads",
        "fuse m --max-memory 10KB",
        "fuse m --max-memory much",
        "fuse m --shard-size -1",
        "fuse m --dtype f64",
        "fuse m --pad-to-tp 0",
        "convert m --to nonsense",
        "convert m",
        "check m --for nobody",
        "check m --for vllm --tp 0",
        "generate m",
        "generate m -p x --temperature nan",
        "generate m -p x --temperature -1",
        "generate m -p x --top-p 0",
        "generate m -p x --top-p 1.1",
        "generate m -p x --seed -1",
        "generate m -p x --device tpu",
        "generate m -p x --head int2",
        "generate m -p x -n 0",
        "generate m -p x --system you",
        "eval perplexity m --chunks 0",
        "eval perplexity m --context 3",
        "eval perplexity m --fail-above 0.1",
        "eval perplexity m --noise-floor",
        "eval perplexity m --resume",
        "eval perplexity m --protocol mine",
        "eval nonsense m",
        "demo --chunks 1",
        "diff m",
        "to-gguf m --type q9",
        "to-gguf m --type q4_0 --tensor-type q4_0",
        "to-gguf m --type q4_0 --tensor-type (=q4_0",
        "to-gguf m --type q4_0 -o m.bin",
    ],
)
def test_words_that_cannot_be_leave_with_2(call: str, here: Path) -> None:
    """Before any model is looked for: there is none of this name."""
    ran = qconvert(*call.split())
    assert ran.code == 2 and ran.out == "" and ran.err.startswith("Error: ") and "\nHint: " in ran.err
    assert not list(here.iterdir())


def test_every_tensor_is_listed_with_its_role_and_form(models: Path, here: Path) -> None:
    found = qconvert("inspect", models / "quantized", "--tensors", "--json").json["tensor_list"]
    rows = {row["name"]: row for row in found}
    assert rows[Q] == {"name": Q, "role": "attn.q", "shape": [256, 128], "form": "int8-g128"}
    assert rows[EMBED]["form"] == "bf16" and rows[EMBED]["role"] == "embed"
    lines = qconvert("inspect", models / "quantized", "--tensors").out.splitlines()
    assert any(line.split() == [Q, "attn.q", "256x128", "int8-g128"] for line in lines)
    assert "tensor_list" not in qconvert("inspect", models / "quantized", "--json").json
    (here / "config.json").write_bytes((models / "plain" / "config.json").read_bytes())
    alone = qconvert("inspect", "config.json", "--tensors", "--json").json
    assert alone["from"] == "config.json" and {row["form"] for row in alone["tensor_list"]} == {"bf16"}


def test_equal_tensors_are_listed_when_all_are_asked_for(models: Path) -> None:
    some = qconvert("diff", models / "plain", models / "quantized", "--json").json
    every = qconvert("diff", models / "plain", models / "quantized", "--all", "--json").json
    assert some["summary"] == every["summary"]
    assert {row["status"] for row in some["tensors"]} == {"differs"} and len(some["tensors"]) == 7
    assert len(every["tensors"]) == sum(every["summary"].values()) == 13
    steps = [row["max_steps"] for row in some["tensors"]]
    assert all(0.3 < step < 2 for step in steps)
    same = qconvert("diff", models / "plain", models / "fused", "--exit-code")
    assert same.code == 0 and same.out.splitlines() == ["13 equal"]
    assert qconvert("diff", models / "plain", models / "quantized", "--exit-code", "--json").code == 3


@pytest.mark.parametrize(("ranks", "code"), [(1, 0), (2, 0), (3, 3), (1024, 3)])
def test_a_loader_is_asked_with_its_ranks(ranks: int, code: int, models: Path) -> None:
    ran = qconvert("check", models / "plain", "--for", "vllm", "--tp", ranks)
    assert ran.code == code
    assert ran.out.endswith("OK: vllm should load this\n") == (code == 0)
    found = qconvert("check", models / "plain", "--for", "vllm", "--tp", ranks, "--json")
    assert found.code == code and found.json["tp"] == ranks
    assert any(problem["severity"] == "error" for problem in found.json["problems"]) == (code == 3)


@pytest.mark.parametrize("loader", ["vllm", "sglang", "transformers", "llama.cpp", "mlx"])
def test_every_loader_answers_about_a_plain_model(loader: str, models: Path) -> None:
    ran = qconvert("check", models / "plain", "--for", loader, "--json")
    assert ran.json["for"] == loader and ran.code in (0, 3)
    assert all({"severity", "subject", "fact", "hint"} <= problem.keys() for problem in ran.json["problems"])


def test_env_names_every_package_in_lines_and_in_json() -> None:
    found = qconvert("env", "--json").json
    assert found["packages"].keys() == set(PACKAGES) and found["cores"] == available_cores()
    assert found["packages"]["numpy"][0].isdigit() and found["cuda"]["available"] in (True, False)
    lines = dict(line.split(None, 1) for line in qconvert("env", "-q").out.splitlines())
    installed = {name: version or "not installed" for name, version in found["packages"].items()}
    assert installed.items() <= lines.items() and lines["cores"] == str(found["cores"])
    assert found["cuda"].get("reason", "CUDA") in lines["cuda"]


def test_generation_goes_as_far_as_it_is_told_and_repeats_itself(models: Path) -> None:
    def run(*more: object) -> Any:
        return qconvert(
            "generate", models / "plain", "-p", "def f", "--backend", "reference", "--json", *more
        )

    few, more = run("-n", 3).json, run("--max-tokens", 6).json
    assert 1 <= few["tokens"] <= 3 and few["tokens"] <= more["tokens"] <= 6
    assert few["prompt_tokens"] == 5 and few["asked"]["max_tokens"] == 3
    hot = ("-n", 6, "--temperature", 5.0)
    texts = [run(*hot, "--seed", seed).json["text"] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    greedy = run("-n", 6, "--temperature", 5.0, "--top-p", 1e-6).json["text"]
    assert greedy == more["text"]  # nothing but the likeliest token reaches so little
    assert run("-n", 2, "--head", "int8").json["computed"]["head"] == "int8"


def test_a_prompt_is_read_from_stdin(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("def f\n"))
    ran = qconvert("generate", models / "plain", "-p", "-", "-n", 1, "--json")
    assert ran.json["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("variable", "value", "call", "key", "expected"),
    [
        ("QCONVERT_FUSE_OUT", "there", "fuse {plain} --dry-run --json", "out", "there"),
        ("QCONVERT_FUSE_MAX_MEMORY", "3GB", "fuse {plain} --dry-run --json", "max_memory", 3_000_000_000),
        ("QCONVERT_CHECK_TP", "2", "check {plain} --for vllm --json", "tp", 2),
        ("QCONVERT_CHECK_LOADER", "vllm", "check {plain} --json", "for", "vllm"),
        ("QCONVERT_TO_GGUF_FILE_TYPE", "q8_0", "to-gguf {plain} --dry-run --json", "file_type", "Q8_0"),
    ],
)
def test_options_may_come_from_the_environment(
    variable: str,
    value: str,
    call: str,
    key: str,
    expected: object,
    models: Path,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(variable, value)
    assert qconvert(*call.format(plain=models / "plain").split()).json[key] == expected


def test_a_command_line_wins_over_the_environment(
    models: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QCONVERT_FUSE_OUT", "there")
    monkeypatch.setenv("QCONVERT_FUSE_SHARD_SIZE", "nonsense")
    ran = qconvert("fuse", models / "plain", "-o", "here", "--shard-size", "1GB", "--dry-run", "--json")
    assert ran.json["out"] == "here"
    assert qconvert("fuse", models / "plain", "--dry-run").code == 2


class Terminal(io.StringIO):
    """A stderr that somebody is watching."""

    def isatty(self) -> bool:
        return True


def job_of(model: Path, *, to_gguf: bool = False) -> Any:
    import qconvert as library

    target = library.GGUFTarget("q8_0") if to_gguf else None
    recipe = library.Recipe() if to_gguf else library.Recipe(fuse=("qkv",))
    request = library.Request("to-gguf" if to_gguf else "fuse", recipe, target=target)
    return library.prepare(library.open_model(str(model)), request, library.RunOptions())


def test_the_bar_counts_the_bytes_that_are_read(
    models: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tqdm

    import qconvert as library

    bars: list[Any] = []
    converted: list[Any] = []
    names: list[str] = []

    class Bar(tqdm.tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

        def reset(self, total: float | None = None) -> None:
            converted.append((self.n, self.total, names[-1]))
            super().reset(total)

        def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
            names.extend([s] if s else [])
            super().set_postfix_str(s, refresh)

    monkeypatch.setattr(tqdm, "tqdm", Bar)
    job = job_of(models / "plain")
    for talks, stream in ((True, Terminal()), (False, Terminal()), (True, io.StringIO())):
        out = here / f"{talks}{type(stream).__name__}"
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", stream)
            work = Work([job.compiled.plan], job.container.files(out))
            with progress.progress(work, talks=talks) as told:
                library.execute(job, out, told.listen, verified=told.verified)
    (bar,) = bars  # only where somebody watches who was not told to be quiet
    weights = sum(len(data) for _, _, data in stored(models / "plain").values())
    ((read, of, name),) = converted
    assert read == of == weights
    assert any(each.endswith(name.removeprefix("...")) for each in job.compiled.outputs)
    (file,) = job.container.files(Path("out"))
    assert bar.n == bar.total == file.size + sum(spec.nbytes for spec in file.specs.values())
    assert bar.desc == "verifying" and not bar.postfix


def test_without_a_terminal_there_is_a_line_every_30_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    lines = progress.Lines("bytes", lambda: now)
    for second in range(0, 121, 10):  # 1 % a second from the beginning on
        now = float(second)
        lines.tell(second * 10, 1_000)
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "30 % of 1,000 bytes, about 70 s left",
        "60 % of 1,000 bytes, about 40 s left",
        "90 % of 1,000 bytes, about 10 s left",
    ]
    assert progress.duration(89.4) == "89 s" and progress.duration(90) == "2 min"
    assert progress.duration(12 * 60) == "12 min" and progress.duration(12_000) == "3 h 20 min"


def test_a_run_counts_passes_through_layers_not_layers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(progress.Lines, "EVERY", 0.0)
        with progress.layers_passed(100, talks=True) as passed:
            passed(800, 1700)  # 8 layers forward and 9 backward, 100 tokens
    assert capsys.readouterr().err.startswith("47 % of 17 passes through layers, about ")


def test_a_narrow_terminal_shortens_the_name_and_not_the_bar() -> None:
    name = "model.layers.12.self_attn.q_proj.weight"
    assert progress.shortened(name, 80) == name
    assert progress.shortened(name, 20) == "...ttn.q_proj.weight"
    assert progress.shortened(name, -4) == "" == progress.shortened(name, 8)


def test_help_and_version_are_words_too() -> None:
    assert qconvert("help", "diff").out == qconvert("diff", "--help").out
    assert qconvert("help", "eval", "weights").out == qconvert("eval", "weights", "--help").out
    assert qconvert("help").out == qconvert("--help").out
    assert qconvert("-V").out == qconvert("--version").out
    ran = qconvert("help", "quantise")
    assert ran.code == 2 and "Did you mean 'quantize'?" in ran.err


def test_a_compilation_is_explained_once_and_what_the_cache_gives_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from numba import config

    from qconvert.quant.simd.lanes import kernel

    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path))  # empty, however often the tests are run

    def doubled(value: float) -> float:
        return value * 2

    for talks, said in ((True, 1), (False, 0)):
        compiled, other = kernel(doubled), kernel(lambda value: value + 1)
        with progress.compiling_explained(talks=talks):
            for call in (compiled, compiled, other):
                call(1.5)
        shown = capsys.readouterr().err
        assert shown.count(progress.COMPILING) + shown.count(progress.NO_CACHE) == said
    with progress.compiling_explained(talks=True):
        compiled(2.5)  # is compiled already
    assert capsys.readouterr().err == ""


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    code = (
        "from numba.core import caching; caching.CacheImpl._locator_classes = []; "
        "from qconvert.cli import main; "
        f"main(['quantize', 'embedded', '--bits', '4', '--min-max', '-o', {str(tmp_path / 'out')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert progress.NO_CACHE in done.stderr and progress.COMPILING not in done.stderr


def test_reports_of_both_containers_tell_the_plan_and_the_result_alike(models: Path, here: Path) -> None:
    import qconvert as library

    for to_gguf in (True, False):
        job, out = job_of(models / "plain", to_gguf=to_gguf), here / ("m.gguf" if to_gguf else "out")
        report = report_of(job, out)
        assert isinstance(report, GGUFReport) is to_gguf and report.path == out
        planned, lines = report.plan_json(), report.lines()
        result = library.execute(job, out)
        after = report.result_json(result, 1.5)
        changed = {"dry_run", "seconds", "kept", "certificates", "sha256"}
        assert {k: v for k, v in planned.items() if k not in changed}.items() <= after.items()
        assert after["seconds"] == 1.5 and report.lines() == lines and lines[0].startswith("plain  ->  ")
        assert report.verdict(result, 1.5).startswith("done in 1.5 s")
        assert bool(list(report.warnings())) is not to_gguf  # stacked q, k, v, which not every loader knows
        assert json.loads(json.dumps(after)) == after


@pytest.mark.parametrize(
    ("kinds", "line"),
    [
        ([("exact", 0.0)] * 3, "exact"),
        ([("exact", 0.0), ("cast", None)], "1 cast + 1 exact"),
        ([("measured", 0.0123), ("exact", 0.0)], "1 exact + 1 measured (at most 0.012 steps)"),
        ([("quantized", None)] * 2, "2 quantized"),
    ],
)
def test_a_certificate_is_said_in_one_line(kinds: list[tuple[str, float | None]], line: str) -> None:
    certificates = [{"kind": k, **({} if most is None else {"max_steps": most})} for k, most in kinds]
    found = Certificates()
    for each in certificates:
        found.add(each)
    assert certificate_line({"certificates": asdict(found)}) == line


def test_a_gguf_is_read_by_every_reading_command(gguf: Path, models: Path) -> None:
    assert qconvert("inspect", gguf, "--json").json["family"] == "Qwen3"
    assert qconvert("verify", gguf, "--against", models / "plain").code == 0
    found = qconvert("diff", models / "plain", gguf, "--json").json
    assert found["summary"]["differs"] >= 7 and HEAD not in {row["name"] for row in found["tensors"]}
    assert qconvert("eval", "weights", models / "plain", gguf, "-q").code == 0


def test_quiet_check_prints_what_is_in_the_way_alone(models: Path) -> None:
    ran = qconvert("check", models / "plain", "--for", "vllm", "-q")
    assert (ran.code, ran.out) == (0, "")


def test_windows_beyond_the_positions_are_named_before_the_work() -> None:
    wish = ("eval", "perplexity", "embedded", "--text", "stdlib", "--chunks", 1)
    ran = qconvert(*wish, "--context", 2049, "--json")
    assert ran.err == (
        "Warning: windows of 2,049 tokens are longer than the 2,048 positions of the model; --context 2048 "
        "stays within them\n"
    )
    assert qconvert(*wish, "--context", 64, "--json").err == ""
