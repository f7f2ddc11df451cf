"""Exit code 2 is for words that no file could make right, and comes before any file is looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from qconvert.cli import COMMANDS
from tests.support.commands import qconvert

# What is typed, about a model that is nowhere: the words alone decide.
WRONG = [
    ("bench", "bench nowhere -p 0 -n 0"),
    ("inspect", "inspect --tensors=yes nowhere"),
    ("calibrate", "calibrate nowhere --tokens some"),
    ("calibrate", "calibrate nowhere --window 8"),
    ("calibrate", "calibrate nowhere --imatrix i.dat"),
    ("calibrate", "calibrate nowhere --process-output"),
    ("calibrate", "calibrate nowhere --merge a --text default"),
    ("calibrate", "calibrate nowhere --imatrix i.gguf -o i.gguf"),
    ("quantize", "quantize nowhere"),
    ("quantize", "quantize nowhere --bits four"),
    ("quantize", "quantize nowhere --scheme int9"),
    ("quantize", "quantize nowhere --scheme int4 --recipe nowhere.yaml --bits"),
    ("quantize", "quantize nowhere --scheme int4 --bits 4"),
    ("quantize", "quantize nowhere --group-size 64"),
    ("quantize", "quantize nowhere --bits 4 --rule mlp.down"),
    ("quantize", "quantize nowhere --bits 4 --rule mlp.down=int1"),
    ("quantize", "quantize nowhere --bits 4 --rule re:(=int8"),
    ("quantize", "quantize nowhere --bits 4 --keep re:("),
    ("quantize", "quantize nowhere --bits 4 --keep layers.3-1.mlp.down"),
    ("quantize", "quantize nowhere --bits 5 --layout gptq"),
    ("quantize", "quantize nowhere --bits 4 --layout int-quantized"),
    ("quantize", "quantize nowhere --bits 4 --layout awq --rule mlp.down=int8"),
    ("quantize", "quantize nowhere --bits 4 --layout mxfp4"),
    ("quantize", "quantize nowhere --layout fp8"),
    ("quantize", "quantize nowhere --layout fp8 --scheme FP8_BLOCK"),
    ("quantize", "quantize nowhere --bits 4 --pad-to-tp 0"),
    ("fuse-qkv", "fuse-qkv nowhere --dtype int8"),
    ("fuse", "fuse nowhere --only mlp"),
    ("unfuse", "unfuse nowhere --only mlp"),
    ("tie", "tie nowhere --max-memory some"),
    ("untie", "untie nowhere --shard-size -1"),
    ("merge", "merge nowhere --shard-size -1"),
    ("untie", "untie nowhere --shard-size 0"),
    ("dequantize", "dequantize nowhere -j 0"),
    ("convert", "convert nowhere --to marlin"),
    ("convert", "convert nowhere --to gptq --scheme int9"),
    ("convert", "convert nowhere --to gptq --scheme nf4"),
    ("convert", "convert nowhere --to gptq --scheme int5"),
    ("convert", "convert nowhere --to bitsandbytes --scheme int4-g64"),
    ("convert", "convert nowhere --to fp8 --scheme int8-channel"),
    ("convert", "convert nowhere --to mlx --scheme int4-g48"),
    ("convert", "convert nowhere --to bf16 --scheme int4"),
    ("convert", "convert nowhere --to bf16 --dtype f16"),
    ("convert", "convert nowhere --to gguf --scheme q4_x"),
    ("convert", "convert nowhere --to gguf --dtype f16"),
    ("to-gguf", "to-gguf nowhere --type q4_x"),
    ("from-gguf", "from-gguf nowhere --dtype q8_0"),
    ("check", "check nowhere --for vllm --tp 0"),
    ("check", "check nowhere --for koboldcpp"),
    ("completion", "completion tcsh"),
    ("verify", "verify nowhere --against"),
    ("diff", "diff nowhere"),
    ("generate", "generate nowhere -p x --device tpu"),
    ("generate", "generate nowhere -p x --system y"),
    ("generate", "generate nowhere -p \udcff"),
    ("generate", "generate nowhere -p x --top-p 0"),
    ("eval", "eval speed nowhere"),
    ("eval", "eval perplexity nowhere --fail-above 0.1"),
    ("eval", "eval perplexity nowhere --noise-floor"),
    ("eval", "eval perplexity nowhere --resume"),
    ("eval", "eval perplexity nowhere --context 3"),
    ("eval", "eval perplexity nowhere --protocol c4"),
    ("eval", "eval perplexity nowhere --device cuda:x"),
    ("eval", "eval weights nowhere"),
    ("demo", "demo --chunks 1"),
    ("env", "env nowhere"),
]
# The same commands on a file or a model that does not allow what is asked.
REFUSED = [
    "inspect nowhere",
    "quantize nowhere --bits 4",
    "quantize {model} --recipe nowhere.yaml",
    "quantize {model} --recipe wrong.yaml",
    "quantize {model} --recipe empty.yaml",
    "quantize {model} --bits 4 --keep mlp.dwon",
    "quantize {model} --bits 4 --keep layers.7.mlp.down",
    "quantize {model} --bits 4 --group-size 64 -o {model}",
    "convert {model} --to gptq",
    "to-gguf {model} --type q8_0 --imatrix nowhere.dat",
    "quantize {model} --bits 4 --calibration nowhere.safetensors",
    "calibrate nowhere",
    "calibrate {model} --merge nowhere -o out",
    "from-gguf {model}",
    "verify nowhere",
    "generate nowhere -p x",
    "eval perplexity {model} --text nowhere.txt",
    "eval weights {model} nowhere",
]


@pytest.mark.parametrize("words", [words for _, words in WRONG])
def test_words_that_no_file_could_make_right_are_usage(words: str, here: Path) -> None:
    ran = qconvert(*words.split(" "))
    assert (ran.code, ran.out) == (2, ""), ran.err
    error, hint = ran.err.splitlines()
    assert error.startswith("Error: ") and hint.startswith("Hint: ")
    assert not list(here.iterdir())


def test_every_command_can_be_called_wrongly() -> None:
    assert {command for command, _ in WRONG} == set(COMMANDS)
    assert all(words.startswith(command) for command, words in WRONG)


@pytest.mark.parametrize("words", REFUSED)
def test_what_files_and_models_do_not_allow_is_no_usage(words: str, models: Path, here: Path) -> None:
    (here / "wrong.yaml").write_text("scheme: int9\n")
    (here / "empty.yaml").write_text("fuse: [qkv]\n")
    ran = qconvert(*words.format(model=models / "plain").split(" "))
    assert (ran.code, ran.out) == (1, ""), ran.err
    assert ran.err.splitlines()[-2].startswith("Error: ") and ran.err.splitlines()[-1].startswith("Hint: ")
