"""The library as its users call it: a handful of names, and nothing heavy before one is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import qconvert
from tests.support.commands import files_of, made
from tests.support.models import tiny


def test_every_public_name_is_there_and_documented() -> None:
    for name in qconvert.__all__:
        value = getattr(qconvert, name)
        assert name == "__version__" or value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        qconvert.nonsense  # noqa: B018


def test_a_conversion_is_what_the_command_writes(tmp_path: Path) -> None:
    source = tiny(tmp_path / "m")
    model = qconvert.open_model(str(source))
    recipe = qconvert.Recipe(scheme=qconvert.parse_scheme("int4-g32"), fuse=("qkv",))
    job = qconvert.prepare(model, qconvert.Request("quantize", recipe), qconvert.RunOptions(jobs=2))
    seen: list[str] = []
    result = qconvert.execute(job, tmp_path / "api", lambda done: seen.append(done.unit.output.name))
    assert set(seen) == set(job.compiled.outputs) and result.path == tmp_path / "api"
    command = made("quantize", source, "--scheme", "int4-g32", "--fuse", "qkv", "-o", tmp_path / "cli")
    mine, theirs = files_of(result.path), files_of(command)
    for name in mine:
        assert mine[name].replace(b"api", b"cli") == theirs[name], name
    found = qconvert.verify(qconvert.open_model(str(result.path)).checkpoint, against=model.checkpoint)
    assert found.problems == () and found.findings["tensors"] == len(job.compiled.outputs)


def test_layouts_and_gguf_files_are_targets_of_the_same_request(tmp_path: Path) -> None:
    model = qconvert.open_model("embedded")
    keep = qconvert.RunOptions(verify=False)
    gguf = qconvert.Request("to-gguf", target=qconvert.GGUFTarget("q8_0"))
    result = qconvert.execute(qconvert.prepare(model, gguf, keep), tmp_path / "m.gguf")
    assert result.path.read_bytes()[:4] == b"GGUF"
    recipe = qconvert.Recipe(scheme=qconvert.parse_scheme("int4-g128"), layout="gptq")
    gptq = qconvert.Request("quantize", recipe, target=qconvert.Target("gptq"))
    result = qconvert.execute(qconvert.prepare(model, gptq, keep), tmp_path / "gptq")
    assert (result.path / "quantize_config.json").is_file()


def test_the_layout_of_a_recipe_is_written_without_a_target(tmp_path: Path) -> None:
    recipe = qconvert.Recipe(scheme=qconvert.parse_scheme("int4-g128"), layout="gptq")
    job = qconvert.prepare(qconvert.open_model("embedded"), qconvert.Request("quantize", recipe))
    result = qconvert.execute(job, str(tmp_path / "gptq"))
    assert (result.path / "quantize_config.json").is_file()


@pytest.mark.parametrize(
    ("wrong", "fact", "hint"),
    [
        (lambda: qconvert.Recipe(layout="gtpq"), "layout 'gtpq': not one that", "did you mean 'gptq'?"),
        (lambda: qconvert.Target("gtpq"), "layout 'gtpq': not one that", "did you mean 'gptq'?"),
        (lambda: qconvert.Target("fp8", table="fp9"), "table 'fp9': fp8 does not hold it", "fp8-block"),
        (lambda: qconvert.Target("gptq", table="nvfp4"), "scheme 'nvfp4': gptq does not", "modelopt"),
        (lambda: qconvert.Recipe(scheme="int4"), "scheme 'int4': str, where", "parse_scheme("),
        (lambda: qconvert.Rule("mlp", "int4"), "scheme 'int4': str, where", "parse_scheme("),
        (lambda: qconvert.Recipe(fuse=("qvk",)), "fuse: 'qvk' is not known", "qkv, gate_up"),
    ],
)
def test_names_that_are_none_are_errors_where_they_are_given(
    wrong: Callable[[], object], fact: str, hint: str
) -> None:
    with pytest.raises(qconvert.QConvertError) as caught:
        wrong()
    assert caught.value.fact.startswith(fact) and hint in caught.value.hint


def test_what_cannot_be_is_an_error_with_a_fact_and_a_hint() -> None:
    request = qconvert.Request("tie", qconvert.Recipe(tie=True))
    with pytest.raises(qconvert.QConvertError) as caught:
        qconvert.prepare(qconvert.open_model("embedded"), request, qconvert.RunOptions())
    assert "already tied" in caught.value.fact and caught.value.hint


def test_importing_the_package_loads_next_to_nothing() -> None:
    code = "import sys, qconvert; print(sorted(m for m in sys.modules if m.startswith('qconvert')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['qconvert', 'qconvert.core', 'qconvert.core.version']\n"


def test_the_example_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    page = (Path(qconvert.__file__).parents[1] / "docs" / "reference" / "python.md").read_text(
        encoding="utf-8"
    )
    example = page.partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example, "python.md", "exec"), names)
    assert names["found"].problems == ()  # type: ignore[attr-defined]
    assert [model.label for model in names["report"].models] == ["embedded", "out"]  # type: ignore[attr-defined]


def test_what_is_printed_of_a_model_or_a_job_is_a_few_lines(tmp_path: Path) -> None:
    source = tiny(tmp_path / "m")
    model = qconvert.open_model(str(source))
    stored = model.checkpoint.tensors
    nbytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
    heading, *rows, more = str(model).splitlines()
    assert heading.startswith("OpenedModel m: Checkpoint ") and f"{len(stored)} tensors" in heading
    assert 0 < nbytes - int(heading.split()[-2].replace(",", "")) < 20_000  # the file has a header
    assert [row.split()[0] for row in rows] == list(stored)[:3] and f"{len(stored) - 3} more" in more

    keep = qconvert.RunOptions(verify=False)
    recipe = qconvert.Recipe(scheme=qconvert.parse_scheme("int4-g32"), fuse=("qkv",))
    quantizing = qconvert.prepare(model, qconvert.Request("quantize", recipe), keep)
    to_gguf = qconvert.prepare(model, qconvert.Request("to-gguf", target=qconvert.GGUFTarget("q8_0")), keep)
    assert "bf16 -> int4-g32" in str(quantizing) and "qkv_proj" in str(quantizing)
    for job, out in ((quantizing, tmp_path / "q"), (to_gguf, tmp_path / "m.gguf")):
        result = qconvert.execute(job, out)
        binding = model.checkpoint.bind()
        assert str(result).startswith(f"Result {out}: ") and "quantized" in str(result)
        files = qconvert.open_model(str(out)).checkpoint.files
        for value in (job, job.compiled, job.compiled.plan, binding, binding.architecture, result, files):
            assert len(str(value).splitlines()) <= 5 and len(str(value)) < 600, value
    decoder = qconvert.load_runtime(qconvert.open_model(str(tmp_path / "q")).checkpoint)
    assert str(decoder).startswith("Decoder qwen3: ") and "\n" not in str(decoder)
