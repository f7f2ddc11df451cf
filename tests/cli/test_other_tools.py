"""Words of other tools are answered with words that this one has."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from qconvert.cli import COMMANDS, cli
from qconvert.cli.options import ShareType
from qconvert.cli.other_tools import COMMANDS as ELSEWHERE
from qconvert.cli.other_tools import OPTIONS
from tests.support.commands import qconvert
from tests.support.models import tiny


def options_of(command: click.Command) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


def command_of(words: list[str]) -> click.Command:
    command: click.Command = cli
    for word in words:
        if not isinstance(command, click.Group):
            break
        found = command.get_command(click.Context(command), word)
        assert found is not None, word
        command = found
    return command


@pytest.mark.parametrize("said", sorted({*OPTIONS.values(), *ELSEWHERE.values()}))
def test_what_is_advised_is_there(said: str) -> None:
    every = set().union(*(options_of(command_of([name])) for name in COMMANDS if name != "eval"))
    for quoted in re.findall(r"`([^`]+)`", said):
        words = quoted.split()
        if words[0] == "qconvert":
            offered = options_of(command_of(words[1:]))
            assert {word for word in words if word.startswith("-")} <= offered, quoted
        elif words[0].startswith("-"):
            assert words[0] in every, quoted


@pytest.mark.parametrize(
    ("call", "fact", "hint"),
    [
        ("chat m", "No such command 'chat'", "`qconvert generate MODEL --chat`"),
        ("mlx_lm.convert m", "No such command 'mlx_lm.convert'", "--layout mlx`"),
        ("to-gguf m --outtype f16", "No such option '--outtype'", "--type q4_k_m` names the type of a GGUF"),
        ("quantize m --bits 4 --ignore lm_head", "No such option '--ignore'", "`--keep SELECTOR` leaves"),
        (
            "quantize m --bits 4 --group_size 64",
            "No such option '--group_size'",
            "it is written --group-size",
        ),
        ("eval m", "eval m: not a measure", "`qconvert eval perplexity MODEL --reference ORIGINAL`"),
        ("version", "No such command 'version'", "`qconvert env`"),
        ("convert m --to gptq --bits 4", "No such option '--bits'", "--to LAYOUT --scheme int4-g128`"),
        ("quantize m --bits 4 --device cuda", "No such option '--device'", "run on the CPU"),
        (
            "convert m --to vllm",
            "--to vllm: not a layout but a loader, which reads compressed-tensors, int-quantized, gptq, "
            "gptq_v2, awq, bitsandbytes, fp8, mxfp4, modelopt, auto-round, quark, fbgemm_fp8, torchao",
            "--to compressed-tensors",
        ),
        (
            "quantize m --bits 4 --layout llama.cpp",
            "--layout llama.cpp: not a layout but a loader, which reads GGUF files",
            "`qconvert to-gguf MODEL --type q4_k_m`",
        ),
        (
            "quantize m --bits 4 --layout GGUF",
            "--layout GGUF: not a layout of this command",
            "`qconvert to-gguf MODEL --type q4_k_m`",
        ),
        (
            "quantize m --bits 4 --layout bitnet",
            "--layout bitnet: can be read, but not written",
            "--to gptq --scheme int2-channel",
        ),
    ],
)
def test_words_of_other_tools_are_answered(call: str, fact: str, hint: str) -> None:
    ran = qconvert(*call.split())
    said = ran.err.splitlines()
    assert ran.code == 2 and said[0] == f"Error: {fact}" and said[1].startswith("Hint: ") and hint in said[1]
    error = qconvert(*call.split(), "--json").json["error"]
    assert (error["kind"], error["fact"], error["exit_code"]) == ("bad_usage", fact, 2)


def test_a_word_that_is_near_one_of_ours_is_still_completed() -> None:
    assert "Did you mean 'quantize'?" in qconvert("quantise", "m").err
    assert "--layout" in qconvert("quantize", "m", "--layuot", "gptq").err


@pytest.mark.parametrize(
    ("call", "fact", "hint"),
    [
        ("quantize {m} out --bits 4", "out: no such file or folder", "-o names an output: -o out"),
        ("to-gguf {m} m.gguf Q4_K_M", "to-gguf: no type was asked for", "add --type q4_k_m, "),
        ("to-gguf {m}", "to-gguf: no type was asked for", "add --type q4_k_m, "),
        ("quantize {m} --bits 4 -o m.gguf", "m.gguf: a folder is written", "`qconvert to-gguf MODEL --type"),
        ("inspect ./nowhere", "./nowhere: no such file or folder", "a model on the Hub"),
    ],
)
def test_calls_in_the_manner_of_other_tools_say_what_to_type(
    call: str, fact: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ran = qconvert(*call.format(m=tiny(tmp_path / "m")).split(), "--json")
    assert ran.code != 0 and ran.json["error"]["fact"].startswith(fact)
    assert ran.json["error"]["hint"].startswith(hint)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["m"]


def test_a_missing_model_does_not_keep_the_others_from_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny(tmp_path / "m")
    ran = qconvert("quantize", "m", "gone", "--bits", 4, "--group-size", 32, "--keep-going", "--json")
    assert ran.code == 1 and ran.json["error"]["fact"] == "gone: no such file or folder"
    assert (tmp_path / "m-int4-g32/config.json").is_file()


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--layout auto_gptq", "gptq"),
        ("--layout AutoRound", "auto-round"),
        ("--layout llm-compressor", "compressed-tensors"),
        ("--layout GPTQ --method RTN", "gptq"),
    ],
)
def test_layouts_and_methods_have_the_names_of_other_tools(typed: str, meant: str, tmp_path: Path) -> None:
    call = ("quantize", tiny(tmp_path / "m"), "--bits", 4, "--dry-run", "--json")
    ran = qconvert(*call, *typed.split())
    assert ran.code == 0 and ran.json == qconvert(*call, "--layout", meant).json
    assert (ran.json == qconvert(*call).json) is (meant == "compressed-tensors")


def test_a_gate_may_be_written_in_per_cent() -> None:
    share = ShareType()
    assert share.convert("5%", None, None) == share.convert("0.05", None, None) == 0.05
    assert share.convert("1.5e-05", None, None) == 1.5e-5
    for wrong in ("-1", "nan", "inf", "five", "%"):
        with pytest.raises(click.BadParameter, match=r"write 0\.05 or 5%"):
            share.convert(wrong, None, None)
