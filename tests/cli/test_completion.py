"""What a shell is told of the words that may come next."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from huggingface_hub import constants

from qconvert.cli import cli
from qconvert.cli.completion import SHELLS
from tests.support.commands import qconvert


def told(*args: str) -> list[str]:
    """What may complete the last word."""
    asked = ShellComplete(cli, {}, "qconvert", "_QCONVERT_COMPLETE")
    return [f"<{item.type}>" if item.type != "plain" else item.value for item in _items(asked, args)]


def _items(asked: ShellComplete, args: tuple[str, ...]) -> list[Any]:
    return asked.get_completions(list(args[:-1]), args[-1])


@pytest.fixture
def place(here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two models, a GGUF, a folder that is none, and a cache with two repositories."""
    for name in ("model-a", "model-b", "deep/model-c"):
        (here / name).mkdir(parents=True)
        (here / name / "config.json").write_text("{}")
    (here / "mo.gguf").touch()
    cache = tmp_path / "hub"
    for repo in ("models--acme--one", "models--acme--two--x", "datasets--acme--three"):
        (cache / repo / "snapshots" / "0").mkdir(parents=True)
        (cache / repo / "snapshots" / "0" / "config.json").touch()
    (cache / "models--acme--none" / "snapshots").mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return here


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("quantize", "mod"), ["model-a", "model-b"]),
        (("quantize", "model-a", "mo"), ["mo.gguf", "model-a", "model-b"]),
        (("quantize", "./mo"), ["./mo.gguf", "./model-a", "./model-b"]),
        (("inspect", "deep/"), ["deep/model-c"]),
        (("inspect", ""), ["<file>"]),
        (("inspect", "de"), ["<file>"]),
        (("inspect", "nothing/of/that"), ["<file>"]),
        (("verify", "emb"), ["embedded"]),
        (("verify", "model-a", "--against", "acme/"), ["acme/one", "acme/two--x"]),
        (("eval", "perplexity", "model-a", "--reference", "acme/o"), ["acme/one"]),
        (("generate", "acme/t"), ["acme/two--x"]),
        (("check", "model-a", "--for", "v"), ["vllm"]),
        (("convert", "model-a", "--to", "gptq"), ["gptq", "gptq_v2"]),
        (("convert", "model-a", "--to", "bitsandbytes", "--scheme", "nf4"), ["nf4", "nf4-nested"]),
        (("convert", "model-a", "--to", "gguf", "--scheme", "q5_k"), ["q5_k_s", "q5_k_m"]),
        (
            ("quantize", "model-a", "--scheme", "int4-a"),
            [f"int4-asym-{g}" for g in ("g128", "g64", "g32", "channel")],
        ),
        (("quantize", "model-a", "--rule", "mlp.do"), ["mlp.down="]),
        (("quantize", "model-a", "--rule", "mlp.down=k"), ["mlp.down=keep"]),
        (("quantize", "model-a", "--keep", "lm"), ["lm_head"]),
        (("quantize", "model-a", "--layout", "aw"), ["awq"]),
        (("to-gguf", "model-a", "--type", "q4_k"), ["q4_k_s", "q4_k_m"]),
        (("to-gguf", "model-a", "--type", "l"), ["list"]),
        (("to-gguf", "model-a", "--tensor-type", "ffn_down=q6"), ["ffn_down=q6_k"]),
        (("completion", ""), list(SHELLS)),
        (("dequ",), ["dequantize"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_words_are_completed(words: tuple[str, ...], wanted: list[str], place: Path) -> None:
    assert told(*words) == wanted


@pytest.mark.parametrize("kind", ["tables", "types", "schemes"])
def test_what_is_offered_is_taken(kind: str, models: Path, place: Path) -> None:
    """Every scheme and type that is completed is one that the command knows."""
    from qconvert.core.schemes import parse_scheme
    from qconvert.formats.layouts import registry
    from qconvert.plan.gguf.file_types import find_file_type
    from qconvert.plan.passes.transcode import codebook_named

    if kind == "schemes":
        offered = told("quantize", "m", "--scheme", "")
        assert len(offered) == 56 and all(parse_scheme(name) for name in offered)
    elif kind == "types":
        offered = told("to-gguf", "m", "--type", "")
        assert len(offered) > 30
        assert all(find_file_type(name) for name in offered if name not in ("keep", "list"))
    else:
        for layout in registry.written():
            offered = told("convert", "m", "--to", layout, "--scheme", "")
            assert offered and all(codebook_named(layout, name) or parse_scheme(name) for name in offered)


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_one_of_the_shell_and_asks_qconvert(shell: str) -> None:
    ran = qconvert("completion", shell)
    assert ran.code == 0 and f"_QCONVERT_COMPLETE={shell}_complete" in ran.out
    if shutil.which(shell):
        done = subprocess.run([shell, "-n"], input=ran.out, text=True, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr


def test_another_shell_is_a_wrong_command_line() -> None:
    assert qconvert("completion", "csh").code == 2


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_a_command(tmp_path: Path) -> None:
    """The whole way: bash calls the function of the script, which starts qconvert."""
    program = tmp_path / "bin" / "qconvert"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m qconvert "$@"\n')
    program.chmod(0o755)
    script = (
        'eval "$(qconvert completion bash)"; COMP_WORDS=(qconvert from); COMP_CWORD=1; '
        '_qconvert_completion qconvert; echo "${COMPREPLY[@]}"'
    )
    root = str(Path(__file__).resolve().parents[2])
    path = {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": root}
    done = subprocess.run(
        ["bash", "-c", script], env={**os.environ, **path}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "from-gguf", done.stderr
