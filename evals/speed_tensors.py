"""Times commands on checkpoints of very many tensors: `python evals/speed.py tensors --experts 896`.

The files are sparse: their headers and sizes are real, their weights are zeros that take no disk. What is
measured is what a tensor costs beside its bytes: processor seconds and peak memory of every command.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from evals.processes import reused_folder
from qconvert.core.dtypes import DType, Json, TensorSpec
from qconvert.core.version import __version__
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.models import Architecture
from qconvert.report.tables import size, table

SHARD_BYTES = 4_000_000_000
HIDDEN, INNER = 256, 128
"""Of an expert, whose weights take 64 KiB each in bf16."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a command took: processor seconds in its own code and in the kernel, wall seconds, peak memory."""

    user: float
    system: float
    seconds: float
    peak_bytes: int


@click.command("tensors")
@click.option("--layers", default=92, show_default=True)
@click.option("--experts", default=896, show_default=True)
@click.option("--rounds", default=1, show_default=True)
@click.option("--max-memory", default="512MB", show_default=True, help="Of the conversion.")
@click.option("--convert", "converts", is_flag=True, help="Convert too, not only plan.")
@reused_folder
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Write the figures as JSON here too.")
def tensors(
    layers: int,
    experts: int,
    rounds: int,
    max_memory: str,
    converts: bool,
    folder: Path | None,
    out: Path | None,
) -> None:
    """Time what very many tensors cost beside their bytes."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = make_sparse((folder or Path(scratch)) / f"moe-{layers}-{experts}", layers, experts)
        made = Path(scratch) / "out"
        quantize = ["quantize", str(source), "--bits", "4", "--min-max", "-q", "-o", str(made)]
        commands = {"inspect": ["inspect", str(source)], "quantize --dry-run": [*quantize, "--dry-run"]}
        if converts:
            converting = [*quantize, "--max-memory", max_memory, "--overwrite"]
            commands["quantize --no-verify"] = [*converting, "--no-verify"]
            commands["quantize"] = converting
        rows: dict[str, list[Cost]] = {name: [] for name in commands}
        for _ in range(rounds):
            for name, words in commands.items():
                rows[name].append(cost([sys.executable, "-m", "qconvert", *words]))
                shutil.rmtree(made, ignore_errors=True)
        count = len(Architecture.of(_config(layers, experts)).parameters)
    click.echo(f"{count:,} tensors, --max-memory {max_memory}")
    click.echo("\n".join(_lines(rows)))
    if out is not None:
        said: Json = {"layers": layers, "experts": experts, "tensors": count, "max_memory": max_memory}
        runs = {name: [asdict(each) for each in found] for name, found in rows.items()}
        out.write_text(json.dumps({**said, "qconvert": __version__, "runs": runs}, indent=1) + "\n")


def make_sparse(folder: Path, layers: int, experts: int) -> Path:
    """A Qwen3-MoE checkpoint of this many layers and experts, all zeros; returns the folder."""
    marker = folder / "config.json"
    config = json.dumps(_config(layers, experts), indent=2) + "\n"
    if marker.is_file() and marker.read_text() == config:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    places = Architecture.of(json.loads(config)).parameters.values()
    specs = [TensorSpec(place.name, DType.BF16, place.shape) for place in places]
    for plan in plan_files(specs, SHARD_BYTES, {"format": "pt"}):
        with (folder / plan.name).open("wb") as file:
            file.write(plan.head)
            file.truncate(plan.size)  # a hole, which takes no room
    marker.write_text(config)
    return folder


def _config(layers: int, experts: int) -> Json:
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "torch_dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": 4 * HIDDEN,
        "moe_intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_experts": experts,
        "num_experts_per_tok": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 4096,
        "vocab_size": 1024,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }


def cost(command: list[str]) -> Cost:
    """Run a command in a process of its own; ClickException when it fails."""
    started = os.times().elapsed
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise click.ClickException(f"{' '.join(command)}: exit code {code}")
    seconds = os.times().elapsed - started
    return Cost(usage.ru_utime, usage.ru_stime, seconds, usage.ru_maxrss * 1024)


def cost_cells(name: str, costs: list[Cost], digits: int = 1) -> list[str]:
    """A line of a table of runs: medians of seconds and processor seconds, the largest peak."""
    seconds = statistics.median(run.seconds for run in costs)
    processor = statistics.median(run.user + run.system for run in costs)
    peak = size(max(run.peak_bytes for run in costs))
    return [name, f"{seconds:.{digits}f}", f"{processor:.{digits}f}", peak]


def _lines(rows: dict[str, list[Cost]]) -> list[str]:
    cells = []
    for name, runs in rows.items():
        medians = [statistics.median(getattr(run, field) for run in runs) for field in ("user", "system")]
        peak = size(max(run.peak_bytes for run in runs))
        cells.append([name, *(f"{value:.1f}" for value in medians), peak])
    return table(["command", "user seconds", "system seconds", "peak memory"], cells)
