"""The command line as a user meets it: exit codes, exact words, one JSON object, nothing left behind."""

from __future__ import annotations

import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import jsonschema
import numpy as np
import pytest

from qconvert import __version__
from qconvert.cli import COMMANDS, cli
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook
from tests.support.commands import failed, made, qconvert, strict_json
from tests.support.models import EMBED, HEAD, tiny

# Words of the labels of forms: one of each kind.
FORMS = (
    AffineInt(4, 128, False, DType.BF16).label,
    AffineInt(8, None, True, DType.BF16).label.replace("int8", "int4"),
    replace(AffineInt(4, 128, True, DType.BF16), act_order=True).label,
    AffineMin(4, 64, DType.BF16).label,
    Codebook("nf4", 64, DType.F32, DType.BF16, second="nested").label,
    Codebook("fp4", 64, DType.F32, DType.BF16).label,
    Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128).label,
    Codebook("e4m3", None, DType.F32, DType.BF16, group_rows=None).label,
    Codebook("e2m1", 32, DType.F8_E8M0, DType.BF16).label,
    Codebook("e2m1", 16, DType.F8_E4M3, DType.BF16, second="divided").label,
)
ROOT = Path(__file__).resolve().parents[2]
Q = "model.layers.0.self_attn.q_proj.weight"


def test_a_deleted_folder_is_told(models: Path, here: Path) -> None:
    here.rmdir()
    for command in (
        ("quantize", models / "plain", "--bits", 4),
        ("to-gguf", models / "plain", "--type", "f16"),
    ):
        failed(qconvert(*command), "the current folder was deleted", "cd to a folder that exists")


def test_a_reader_who_left_does_not_make_finished_work_a_failure(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "qconvert", "fuse", str(models / "plain"), "-o", str(out)]
    read, write = os.pipe()
    os.close(read)
    try:
        assert subprocess.run(command, stdout=write, check=False, cwd=ROOT).returncode == 0
    finally:
        os.close(write)
    assert (out / "config.json").is_file()


def test_help_lists_the_commands_in_their_order() -> None:
    ran = qconvert("--help")
    listed = [
        line.split()[0] for line in ran.out.split("Commands:\n")[1].splitlines() if line.startswith("  ")
    ]
    assert ran.code == 0 and [name for name in listed if name in COMMANDS] == list(COMMANDS)


def pages() -> Iterator[tuple[str, click.Command]]:
    """Every command and every one below it, by what is typed."""
    context = click.Context(cli)
    for name in COMMANDS:
        command = cli.get_command(context, name)
        assert command is not None
        yield name, command
        for below in getattr(command, "commands", {}):
            yield f"{name} {below}", command.commands[below]  # type: ignore[attr-defined]


@pytest.mark.parametrize("command", [name for name, _ in pages()])
def test_every_command_explains_itself(command: str) -> None:
    ran = qconvert(*command.split(), "--help")
    assert ran.code == 0 and ran.out.startswith(f"Usage: qconvert {command} ") and not ran.err
    assert max(map(len, ran.out.splitlines())) <= 100 and "RANGE" not in ran.out
    assert re.match(
        rf"    (torchrun .* -m )?qconvert {command.split(maxsplit=1)[0]}\b", ran.out.splitlines()[-1]
    )
    assert "-q, --quiet" in ran.out or command in ("eval", "completion")


def test_every_option_is_explained_in_a_sentence() -> None:
    for name, command in pages():
        for option in command.params:
            if isinstance(option, click.Option):
                said = option.help or ""
                assert said[:1].isupper() or said.startswith(("llama.cpp", "UTF-8")), (name, option.opts)
                assert said.endswith("."), (name, option.opts)


def test_examples_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their options are there, with such values; the models need not be."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "0")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "1")
    known = dict(pages())
    for command in known.values():
        listed = (command.epilog or "").splitlines()[2:]
        assert listed
        for line in listed:
            typed = re.sub(r"torchrun --nproc-per-node \d+ -m ", "", line)
            qconvert_, *words = shlex.split(typed.split(" >")[0], comments=True)
            name = " ".join(words[: 2 if " ".join(words[:2]) in known else 1])
            rest = words[len(name.split()) :]
            assert qconvert_ == "qconvert"
            if rest != ["--help"]:
                known[name].make_context(name, rest)


def test_help_waits_for_no_library() -> None:
    """The first page imports no command, and those of commands nothing that computes."""
    for words, never in ((["--help"], "qconvert.plan.recipe"), (["quantize", "--help"], "qconvert.models")):
        heavy = {"numpy", "torch", "numba", "yaml", never}
        program = f"import sys; from qconvert.cli import main\ntry: main({words})\nexcept SystemExit: pass\n"
        program += f"assert not {heavy} & set(sys.modules), {heavy} & set(sys.modules)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False, cwd=ROOT)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("encoding", [encoding for encodings in FORMS for encoding in encodings.split("-")])
def test_inspect_explains_every_form_that_it_shows(encoding: str) -> None:
    assert encoding in qconvert("inspect", "--help").out


def test_the_version() -> None:
    assert qconvert("--version").out == f"qconvert, version {__version__}\n"


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("quantise m", "Did you mean 'quantize'?"),
        ("quantize", "Missing argument 'MODEL...'"),
        ("quantize m --bits 9", "9 is not in the range 2<=x<=8"),
        ("quantize m --bits 4 --group-size 48", "'48' is not one of '32', '64', '128', 'channel'"),
        ("quantize m --max-memory 1KB", "1KB is too little; at least 1MB"),
        ("quantize m --max-memory lots", "'lots' is not a size; write for example 500MB, 5GB or 2GiB"),
        ("quantize m --dtype fp16", "'fp16' is not one of 'bf16', 'f16', 'f32'"),
        ("fuse m -j 0", "0 is not in the range 1<=x<=256"),
        ("fuse m --no-such-flag", "No such option"),
    ],
)
def test_a_wrong_call_is_a_usage_error(args: str, says: str) -> None:
    ran = qconvert(*args.split())
    assert (ran.code, ran.out) == (2, "") and says in ran.err and ran.err.startswith("Error: ")
    assert "\nHint: qconvert" in ran.err and "--help` explains it" in ran.err


@pytest.mark.parametrize("args", ["quantise --json", "quantize --json", "fuse m --json -j 0"])
def test_a_wrong_call_is_one_json_object_too(args: str) -> None:
    ran = qconvert(*args.split())
    assert ran.code == 2 and ran.json["error"]["exit_code"] == 2 and ran.json["error"]["fact"]


def test_a_missing_model(here: Path) -> None:
    ran = qconvert("quantize", "./nowhere", "--bits", 4)
    assert ran.code == 1 and ran.err.startswith("Error: ./nowhere: ") and "Hint: " in ran.err


def test_a_config_alone_can_be_inspected_but_not_converted(models: Path, here: Path) -> None:
    (here / "bare").mkdir()
    (here / "bare" / "config.json").write_bytes((models / "plain" / "config.json").read_bytes())
    by_config, by_headers = (qconvert("inspect", m, "--json").json for m in ("bare", models / "plain"))
    assert by_config["parameters"] == by_headers["parameters"]
    assert (by_config["from"], by_headers["from"]) == ("config.json", "headers")
    failed(
        qconvert("fuse", "bare"),
        "bare: no weights beside the config.json",
        "give the whole model folder",
    )


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("compressed-tensors", None),  # without groups of linears nothing is quantized
        ("gptq", "gptq (config.json says so)"),
        ("awq", "awq (int4-asym-channel)"),
        ("bitsandbytes", "bitsandbytes (int8-channel)"),
        ("fp8", "fp8 (e4m3-tensor)"),
        ("not-known", "not-known (config.json says so)"),
    ],
)
def test_a_config_alone_may_claim_any_quantization(
    models: Path, here: Path, method: str, said: str | None
) -> None:
    config = json.loads((models / "plain" / "config.json").read_text())
    plain = qconvert("inspect", models / "plain", "--json").json
    claiming = config | {"quantization_config": {"quant_method": method}}
    (here / "claims.json").write_text(json.dumps(claiming))
    found = qconvert("inspect", "claims.json", "--json").json
    assert (found["parameters"], found["from"]) == (plain["parameters"], "config.json")
    assert found["quantization"] == said
    (here / "claims").mkdir()
    (here / "claims" / "config.json").write_text(json.dumps(claiming))
    failed(
        qconvert("dequantize", "claims"),
        "claims: no weights beside the config.json",
        "give the whole model folder",
    )


def test_a_lora_folder_and_pickles_are_told_apart(here: Path) -> None:
    marker = here / "executed"

    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (marker,)

    (here / "lora").mkdir()
    (here / "lora" / "adapter_config.json").write_text("{}")
    ran = qconvert("quantize", "lora", "--bits", 4)
    assert ran.code == 1 and "adapter_config.json names no base" in ran.err and "BASE+lora" in ran.err
    tiny(here / "bin", hidden_size=128, num_hidden_layers=1)
    (here / "bin" / "model.safetensors").unlink()
    (here / "bin" / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    ran = qconvert("quantize", "bin", "--bits", 4)
    assert ran.code == 1 and "pytorch_model.bin" in ran.err and "safe_serialization=True" in ran.err
    assert not marker.exists()


def test_quantizing_twice_is_refused(models: Path, here: Path) -> None:
    ran = qconvert("quantize", models / "quantized", "--bits", 4)
    assert ran.code == 1 and "already quantized (int8-g128)" in ran.err and "--allow-requantize" in ran.err


def test_nothing_to_do_is_an_error(models: Path, here: Path) -> None:
    for command, name, fact in (
        ("fuse", "fused", "nothing left to fuse"),
        ("unfuse", "plain", "no fused linears"),
        ("tie", "plain", "already tied"),
        ("untie", "untied", "already a table of its own"),
        ("dequantize", "plain", "no quantized tensors"),
    ):
        ran = qconvert(command, models / name)
        assert ran.code == 1 and fact in ran.err and not list(here.iterdir())


def test_tying_tells_how_far_the_head_is_from_the_embedding(here: Path) -> None:
    tiny(here / "m", tied=False, hidden_size=128, num_hidden_layers=1)
    ran = qconvert("tie", "m")
    assert ran.code == 1 and ran.err.startswith(f"Error: {HEAD}: differs from {EMBED} in ")
    assert "largest difference 0." in ran.err


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_numbers_that_are_none_name_the_tensor_and_the_place(here: Path, bad: float) -> None:
    weight = np.full((256, 128), 0.01, "f4")
    weight[3, 5] = bad
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, changes={Q: weight})
    fact = f"{Q}: NaN or Inf at row 3, column 5 (flat index 389)"
    hint = "the checkpoint is damaged; --allow-nonfinite converts it anyway"
    for command in (("quantize", "m", "--bits", 4), ("fuse", "m")):
        ran = qconvert(*command, "-q")
        assert (ran.code, ran.out) == (1, "") and ran.err.endswith(f"Error: {fact}\nHint: {hint}\n")
        assert [path.name for path in here.iterdir()] == ["m"]


def test_numbers_that_are_none_stay_json_when_allowed(here: Path) -> None:
    weight = np.full((256, 128), 0.01, "f4")
    weight[3, 5], weight[9, 9] = np.nan, np.inf
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, changes={Q: weight})
    out = made("quantize", "m", "--bits", 4, "--allow-nonfinite")
    schema = json.loads((ROOT / "qconvert" / "manifest.schema.json").read_text())
    jsonschema.validate(strict_json((out / "qconvert.json").read_text()), schema)
    ran = qconvert("diff", "m", out, "--json")
    assert [t["relative_rms"] for t in ran.json["tensors"] if t["name"] == Q] == [None]
    fused = made("fuse", "m", "--allow-nonfinite")
    ran = qconvert("verify", fused)
    assert ran.code == 3 and "qkv_proj.weight: NaN or Inf" in ran.err


def test_a_row_that_the_group_does_not_divide(here: Path) -> None:
    tiny(here / "m", hidden_size=128, num_hidden_layers=1, intermediate_size=96)
    failed(
        qconvert("quantize", "m", "--bits", 4),
        "model.layers.0.mlp.down_proj.weight: its rows of 96 columns are not divisible by group size 128",
        "use --group-size 32, or --allow-smaller-group, or keep what does not divide: --keep mlp.down"
        " (sizes that divide: 32, channel)",
    )
    out = made("quantize", "m", "--bits", 4, "--allow-smaller-group")
    assert "int4-g32" in qconvert("inspect", out).out


def test_an_empty_wish_is_refused(models: Path) -> None:
    failed(
        qconvert("quantize", models / "plain"),
        "quantize: no scheme was asked for",
        "add --bits 4, --scheme int8-g128 or --recipe FILE",
        code=2,
    )
    ran = qconvert("quantize", models / "plain", "--bits", 4, "--scheme", "int8")
    assert ran.code == 2 and ran.err.startswith("Error: --scheme: given together with --bits")


@pytest.mark.parametrize("command", ["inspect", "quantize --bits 4", "fuse", "verify", "diff {0}"])
def test_an_error_is_one_json_object(here: Path, command: str) -> None:
    name, *flags = command.format("./nowhere").split()
    ran = qconvert(name, "./nowhere", *flags, "--json")
    assert ran.code == 1 and ran.err == ""
    error = ran.json["error"]
    assert ran.json["schema"] == 1 and error["exit_code"] == 1 and "nowhere" in error["fact"]


def test_warnings_do_not_disturb_json(models: Path, here: Path) -> None:
    ran = qconvert("fuse", models / "plain", "--json", "-o", "out")
    assert ran.code == 0 and ran.err == "" and ran.json["warnings"]


def test_inspect_names_ties_fusions_and_quantization(models: Path) -> None:
    found = qconvert("inspect", models / "fused", "--json").json
    assert (found["tied"], found["fusions"], found["quantization"]) == (
        True,
        ["attn.qkv", "mlp.gate_up"],
        None,
    )
    assert "head tied to the embedding" in qconvert("inspect", models / "plain").out
    assert "quantization: compressed-tensors (int8-g128)" in qconvert("inspect", models / "quantized").out
    listed = qconvert("inspect", models / "quantized", "--tensors", "--json").json["tensor_list"]
    assert {"name": Q, "role": "attn.q", "shape": [256, 128], "form": "int8-g128"} in listed


def test_env_prints_every_package() -> None:
    found = qconvert("env", "--json").json
    assert found["qconvert"] == __version__ and found["packages"]["torch"][0].isdigit()
    machine = found.keys() - {"schema", "ok", "packages"}
    assert len(qconvert("env").out.splitlines()) == len(machine) + len(found["packages"])


def test_a_bug_is_called_a_bug_in_one_line(models: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr("qconvert.convert.execute.execute", broken)
    failed(
        qconvert("untie", models / "plain", "-q"),
        "unexpected ZeroDivisionError: division by zero",
        "this is a bug in qconvert; set QCONVERT_DEBUG=1 for the traceback",
    )
    monkeypatch.setenv("QCONVERT_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        qconvert("untie", models / "plain", "-q")


def test_what_the_system_refuses_is_no_bug(models: Path, here: Path) -> None:
    (here / "file").write_text("")
    ran = qconvert("eval", "weights", models / "plain", models / "quantized", "-o", "file/report")
    assert (ran.code, ran.out) == (1, "") and "file" in ran.err and "bug" not in ran.err
    assert ran.err.splitlines()[-1].startswith("Hint: ")
    ran = qconvert("untie", models / "plain", "-o", "file/out")
    assert ran.err.endswith(
        "out.partial: cannot be created: Not a directory\n"
        "Hint: check the path: a part of it is a file, not a folder\n"
    )


def test_a_gguf_is_known_by_its_first_bytes(models: Path, here: Path) -> None:
    made("to-gguf", models / "plain", "--type", "q8_0", "-o", "m.gguf")
    blob = (here / "m.gguf").rename(here / "sha256-0123")
    assert "q8_0" in qconvert("inspect", blob).out
    (here / "sha256-0123").write_bytes(b"neither")
    failed(
        qconvert("inspect", blob),
        "sha256-0123: neither a safetensors nor a GGUF file",
        "name a folder with config.json and safetensors",
    )
