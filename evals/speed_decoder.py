"""Measures decoding and reading against what the memory allows, beside transformers and llama.cpp.

`python evals/speed.py decode` and `prefill`: a checkpoint of a real model's shape, quantized on the
spot, runs beside its peers in one process, in turns, so that ratios are of the same minutes. The rate
of a round is the rate of its median step, and ratios are taken within rounds, because machines drift.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from evals.processes import options
from evals.synthetic import converted, make_checkpoint
from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.quant.simd.processor import in_words
from qconvert.report.tables import size, table

if TYPE_CHECKING:
    from evals.runners import Runner

BASE = "transformers bf16"
INT4 = "int4, int8 head"
INT8_INPUTS = "int4, bf16 head, int8 inputs"
LLAMA = "llama.cpp Q4_0"
LLAMA_K = "llama.cpp Q4_K_M"
PROMPT = 16
_COPY_BYTES = 256 << 20
_CONVERTED = {
    "MLX 4-bit g64, int8 head": ("mlx", "int4-asym-g64"),
    "NF4, int8 head": ("bitsandbytes", "nf4"),
    "MXFP4, int8 head": ("compressed-tensors", "mxfp4"),
    "FP8 channel, int8 head": ("compressed-tensors", "fp8-channel"),
}

Rates = dict[str, list[float]]
"""Tokens per second of every runner, one figure per round."""


class Pace(NamedTuple):
    """A round: tokens per second, and the processor time of a token, which other work cannot stretch."""

    rate: float
    processor_seconds: float


_threads = click.option("--threads", type=click.IntRange(1), default=2, show_default=True)


@click.command("decode")
@click.option("--tokens", type=click.IntRange(2), default=32, show_default=True, help="Per round.")
@click.option(
    "--layouts",
    is_flag=True,
    help="Weights of other layouts beside int4's, GGUF's beside llama.cpp on the same files. "
    "K-quants want widths of whole 256 (qwen3-0.6b).",
)
@_threads
@options(shape="qwen2.5-0.5b", rounds=5)
def decode(tokens: int, layouts: bool, **measured: Any) -> None:
    """Tokens per second at batch 1, a few tokens into a text."""

    def one_round(runner: Runner) -> Pace:
        runner.start(range(100, 100 + PROMPT))
        runner.step(7)
        steps = [_timed(lambda: runner.step(7)) for _ in range(tokens)]
        wall, processor = (statistics.median(times) for times in zip(*steps, strict=True))
        return Pace(1 / wall, processor)

    make, peers = (_layout_runners, (INT4, LLAMA, LLAMA_K)) if layouts else (_runners, (BASE, LLAMA))
    room = PROMPT + tokens + 1
    _measure("decode", one_round, make, peers, room=room, tokens=tokens, **measured)


@click.command("prefill")
@click.option("--tokens", type=click.IntRange(2), default=2048, show_default=True, help="In the window.")
@_threads
@options(shape="qwen2.5-0.5b", rounds=5)
def prefill(tokens: int, **measured: Any) -> None:
    """Tokens per second of reading a window for its perplexity.

    Ours computes logits and losses in float32, as `eval perplexity` does; transformers logits in
    bfloat16 and its own loss; llama.cpp stops at the logits. A second table says what ours spends its
    processor time on.
    """

    from evals.reading_shares import reading_shares  # the decoder, only once the command is chosen

    text = [i % 1000 for i in range(tokens)]

    def one_round(runner: Runner) -> Pace:
        wall, processor = _timed(lambda: runner.read(text))
        return Pace(tokens / wall, processor / tokens)

    def shares(runner: Runner) -> dict[str, float]:
        return reading_shares(lambda: runner.read(text))

    peers = (BASE, LLAMA)
    _measure("prefill", one_round, _runners, peers, room=tokens, tokens=tokens, shares=shares, **measured)


def _measure(
    what: str,
    one_round: Callable[[Runner], Pace],
    make: Callable[[Path, str, int, int], list[Runner]],
    peers: tuple[str, ...],
    *,
    room: int,
    tokens: int,
    shape: str,
    threads: int,
    rounds: int,
    folder: Path | None,
    out: Path | None,
    shares: Callable[[Runner], dict[str, float]] | None = None,
) -> None:
    import torch

    from evals.runners import instruction_sets

    torch.set_num_threads(threads)
    with nullcontext(folder) if folder is not None else tempfile.TemporaryDirectory() as work:
        Path(work).mkdir(parents=True, exist_ok=True)
        runners = make(Path(work), shape, room, threads)
        rates: Rates = {runner.name: [] for runner in runners}
        processor: dict[str, list[float]] = {runner.name: [] for runner in runners}
        copies = []
        for number in range(rounds + 1):
            copy = _copy_bandwidth()
            for runner in runners:
                pace = one_round(runner)
                if number:  # the round before the first warms caches and thread pools
                    rates[runner.name].append(pace.rate)
                    processor[runner.name].append(pace.processor_seconds)
            if number:
                copies.append(copy)
        parts = {} if shares is None else {runner.name: shares(runner) for runner in runners if runner.ours}
    builds = [name for name in ("llama_cpp", "ik_llama_cpp") if find_spec(name)]
    peers_here = [name for name in ("torch", "transformers", "cyllama") if find_spec(name)]
    packages = [*peers_here, *(f"{name}_python" for name in builds)]
    record = {
        "measurement": what,
        "shape": shape,
        "tokens": tokens,
        "threads": threads,
        "rounds": rounds,
        "machine": f"{machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "kernels": in_words(),
        "versions": {"qconvert": __version__, **{name: version(name) for name in packages}},
        "instruction_sets": {name: instruction_sets(name) for name in builds},
        "copy_bytes_per_second": copies,
        "token_bytes": {runner.name: runner.token_bytes for runner in runners},
        "tokens_per_second": rates,
        "processor_seconds_per_token": processor,
        "shares_of_processor_seconds": parts,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }
    _print(record, peers)
    if out is not None:
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _runners(work: Path, shape: str, room: int, threads: int) -> list[Runner]:
    """Every way to run the shape that is installed here."""
    from evals.runners import ours, transformers_bf16

    source = make_checkpoint(work / f"{shape}-x1", shape)
    int4 = converted(source, work / f"{shape}-int4", "quantize", "--bits", "4", "--min-max")
    runners = [
        ours("int4, int4 head", int4, room, head_bits=4),
        ours(INT4, int4, room, head_bits=8),
        ours("int4, bf16 head", int4, room),
        ours(INT8_INPUTS, int4, room, activations="int8"),
        ours("bf16", source, room),
    ]
    if find_spec("transformers"):
        runners.append(transformers_bf16(source))
    if find_spec("cyllama") and find_spec("gguf"):
        from evals.peer_gguf import gguf_files

        for file, path in gguf_files(source, work / shape, ("Q4_0", "Q4_K_M", "bf16")).items():
            if file != "bf16":
                runners.append(ours(f"GGUF {file}, int8 inputs", path, room, activations="int8"))
            runners += [make(f"{peer} {file}", path, room, threads) for peer, make in _llama_cpps()]
    return runners


def _llama_cpps() -> list[tuple[str, Callable[[str, Path, int, int], Runner]]]:
    """Every llama.cpp that is installed here: a build for this machine, a wheel for any, ik_llama.cpp."""
    from evals.runners import ik_llama_cpp, llama_cpp, llama_cpp_native

    found = [("llama.cpp", llama_cpp)]
    if find_spec("llama_cpp"):
        found.append(("llama.cpp native", llama_cpp_native))
    if find_spec("ik_llama_cpp"):
        found.append(("ik_llama.cpp", ik_llama_cpp))
    return found


def _layout_runners(work: Path, shape: str, room: int, threads: int) -> list[Runner]:
    """A decoder for every layout, int4 g128 first; llama.cpp for the GGUF files where it is installed.

    Heads that a layout leaves in 16 bits are rounded to 8 at load, so that what differs is the layers.
    GGUF files are llama-quantize's, read by both decoders.
    """
    from evals.runners import llama_cpp, ours

    source = make_checkpoint(work / f"{shape}-x1", shape)
    int4 = converted(source, work / f"{shape}-int4", "quantize", "--bits", "4", "--min-max")
    runners = [ours(INT4, int4, room, head_bits=8)]
    for name, (layout, scheme) in _CONVERTED.items():
        out = work / f"{shape}-{layout}-{scheme}"
        folder = converted(source, out, "convert", "--to", layout, "--scheme", scheme)
        runners.append(ours(name, folder, room, head_bits=8))
    if find_spec("cyllama") and find_spec("gguf"):
        from evals.peer_gguf import FILE_TYPES, gguf_files

        for name, path in gguf_files(source, work / shape, tuple(FILE_TYPES)).items():
            runners += [ours(f"GGUF {name}", path, room), llama_cpp(f"llama.cpp {name}", path, room, threads)]
    return runners


def _copy_bandwidth() -> float:
    """Bytes read and written per second by a copy that no cache holds; the best of five."""
    import torch

    source, target = torch.ones(_COPY_BYTES, dtype=torch.uint8), torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    return 2 * _COPY_BYTES / min(_timed(lambda: target.copy_(source))[0] for _ in range(5))


def _timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the clock, and of all processors together."""
    begin, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - used


def machine() -> str:
    """The kind of machine, in words: cores and processor."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8").splitlines()
        model = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model
        )
    return f"{os.cpu_count()} cores, {model}"


def _print(record: Json, peers: tuple[str, ...]) -> None:
    rates: Rates = record["tokens_per_second"]
    bandwidth = statistics.median(record["copy_bytes_per_second"])
    head, decoding = ["what", "tokens/s"], record["measurement"] == "decode"
    head += [f"times {peer if peers[0] == INT4 else peer.split()[0]}" for peer in peers if peer in rates]
    head += ["CPU ms/token"]
    head += ["bytes/token", "floor tokens/s", "fraction"] if decoding else []
    cells = []
    for name, values in rates.items():
        row = [name, f"{statistics.median(values):.1f}"]
        for peer in peers:
            ratios = [value / other for value, other in zip(values, rates.get(peer, ()), strict=False)]
            row += [f"{statistics.median(ratios):.2f}"] if ratios else []
        row += [f"{1e3 * statistics.median(record['processor_seconds_per_token'][name]):.2f}"]
        if decoding:
            floor = bandwidth / record["token_bytes"][name]
            row += [
                size(record["token_bytes"][name]),
                f"{floor:.1f}",
                f"{statistics.median(values) / floor:.2f}",
            ]
        cells.append(row)
    conditions = (
        "{measurement}: {shape}, {tokens} tokens, {threads} threads, {rounds} rounds; {machine};"
        " load {load_average:.1f}"
    )
    click.echo(f"{conditions.format(**record)}; copy {bandwidth / 1e9:.1f} GB/s")
    click.echo("\n".join(table(head, cells)))
    _print_shares(record["shares_of_processor_seconds"])
    for peer, package in ((BASE, "transformers"), (LLAMA, "cyllama and gguf")):
        if peer in peers and peer not in rates:
            click.echo(f"{peer} left out: install {package}", err=True)


def _print_shares(parts: dict[str, dict[str, float]]) -> None:
    """Percents of the processor time of a reading, by kind."""
    if not parts:
        return
    from evals.reading_shares import matmul_share

    kinds = sorted({kind for shares in parts.values() for kind in shares})
    cells = [
        [
            name,
            *(f"{100 * share:.1f}" for share in (matmul_share(shares), *(shares.get(k, 0) for k in kinds))),
        ]
        for name, shares in parts.items()
    ]
    click.echo("\n".join(table(["percent of processor time", "matmul", *kinds], cells)))
