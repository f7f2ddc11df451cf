"""Times one step to GGUF against llama.cpp's two: `python evals/speed.py gguf`.

The two steps are writing a bf16 GGUF (timed with qconvert, which is faster at it than llama.cpp's
converter) and llama.cpp's own llama_model_quantize on that file, with as many threads. Every figure is
of a fresh process; ratios are taken within one round, and the median over rounds is printed.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

import click

from evals.processes import Run, copied, max_memory, options, print_ratios, record, timed
from evals.synthetic import make_checkpoint
from qconvert.core.dtypes import Json
from qconvert.formats.tokenizers.pretokenizer_patterns import QWEN2
from qconvert.plan.gguf.file_types import find_file_type

_QUANTIZE = """
import sys
from cyllama.llama import llama_cpp as api
api.disable_logging()
params = api.LlamaModelQuantizeParams()
params.ftype, params.nthread = int(sys.argv[3]), int(sys.argv[4])
api.model_quantize(sys.argv[1], sys.argv[2], params)
"""


@click.command("gguf")
@options(shape="qwen2.5-1.5b", rounds=3)
@click.option("--type", "types", multiple=True, default=("q4_k_m", "q6_k", "q4_0", "q8_0"), show_default=True)
@max_memory
@click.option("--tokenizer", type=click.Path(path_type=Path), help="A folder with one; else a stand-in.")
def gguf(
    shape: str,
    types: tuple[str, ...],
    rounds: int,
    max_memory: str,
    tokenizer: Path | None,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Time `to-gguf` on a checkpoint of a real model's shapes against llama.cpp's two steps."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        work = Path(scratch)
        model = make_checkpoint((folder or work) / f"{shape}-x1", shape)
        source = _with_tokenizer(model, tokenizer, work / "model")
        command = [sys.executable, "-m", "qconvert", "to-gguf", str(source), "-q", "--overwrite"]
        command += ["--max-memory", max_memory]
        for type_ in types:  # compiles the kernels and warms the page cache
            timed([*command, "--no-verify", "--type", type_, "-o", str(work / "ours.gguf")])
        found = [_round(work, source, command, types) for _ in range(rounds)]
    rows = {name: [one[name] for one in found] for name in found[0]}
    faster = {}
    for type_ in types:
        for name in (type_, f"{type_}, verified"):
            runs = zip(rows["bf16"], rows[f"{type_}, llama.cpp"], rows[name], strict=True)
            times = [(bf16.seconds + second.seconds) / ours.seconds for bf16, second, ours in runs]
            faster[name] = f"{statistics.median(times):.2f}"
    print_ratios(f"{shape}, --max-memory {max_memory}", rows, faster)
    if out is not None:
        record(out, {"shape": shape, "max_memory": max_memory}, rows)


def _round(work: Path, source: Path, command: list[str], types: tuple[str, ...]) -> dict[str, Run]:
    """Every measurement once, those of one type next to each other."""
    bf16, ours, theirs = (work / f"{name}.gguf" for name in ("bf16", "ours", "theirs"))
    rows = {"copy": copied(sorted(source.glob("*.safetensors")), work / "copy")}
    rows["bf16"] = timed([*command, "--no-verify", "--type", "bf16", "-o", str(bf16)])
    threads = str(os.cpu_count())
    for type_ in types:
        to_type = [*command, "--type", type_, "-o", str(ours)]
        rows[type_] = timed([*to_type, "--no-verify"])
        rows[f"{type_}, verified"] = timed(to_type)
        number = str(find_file_type(type_).number)
        rows[f"{type_}, llama.cpp"] = timed(
            [sys.executable, "-c", _QUANTIZE, str(bf16), str(theirs), number, threads]
        )
        theirs.unlink()
    bf16.unlink()
    return rows


def _with_tokenizer(model: Path, tokenizer: Path | None, folder: Path) -> Path:
    """A folder of links to the weights beside a tokenizer."""
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path.resolve())
    if tokenizer is None:
        (folder / "tokenizer.json").write_text(json.dumps(stand_in_tokenizer()), encoding="utf-8")
        return folder
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def stand_in_tokenizer() -> Json:
    """The smallest tokenizer with Qwen2's rules: one token per byte."""
    from tokenizers.pre_tokenizers import ByteLevel

    split = {"type": "Split", "pattern": {"Regex": QWEN2[0]}, "behavior": "Isolated", "invert": False}
    return {
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split, {"type": "ByteLevel", "use_regex": False}],
        },
        "model": {
            "type": "BPE",
            "vocab": {character: number for number, character in enumerate(sorted(ByteLevel.alphabet()))},
            "merges": [],
        },
    }
