"""Runs the loaders on what qconvert writes: `python -m evals.clients install|run|table`.

`install` makes an environment for each client (`client_environments.py`); `run` writes every layout
(`client_subjects.py`), has each client load it and read a text (`client_drivers/`), and holds its weights and
log-probabilities against our own decoder, and its success against `qconvert check`; `table` prints the
figures as the documentation has them (`docs/reference/clients.md`).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import click
import numpy as np
import torch
from tokenizers import Tokenizer

import qconvert
from evals.client_environments import CLIENTS, Client, install, versions
from evals.client_subjects import Subject, make, path_of, subjects
from evals.client_table import AMX, tables
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.core.dtypes import DType, Json
from qconvert.core.encodings import ModelTensor
from qconvert.core.values import CodebookRows, DenseRows, Value
from qconvert.demo.corpus import SPARE_TEXT
from qconvert.quant.casts import cast
from qconvert.quant.codebook import TABLES
from qconvert.quant.dequantize import column_scales, numbers

_ROOT = Path(__file__).resolve().parent.parent
RESULTS = _ROOT / "evals" / "results" / "clients.json"
PAGE = _ROOT / "docs" / "reference" / "clients.md"
MODEL_NAME = "embedded"
MODEL = Path(qconvert.open_model(MODEL_NAME).checkpoint.path)
WINDOWS, LENGTH = 4, 64
SECONDS = 180
"""What one checkpoint may compute in one client, in seconds of one core."""
_DTYPES = {"bfloat16": DType.BF16, "float16": DType.F16}


def windows(model: Path, count: int = WINDOWS, length: int = LENGTH) -> list[list[int]]:
    """The first tokens of the text that the embedded model was not trained on, in windows."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode(SPARE_TEXT.read_text(encoding="utf-8")).ids
    return [ids[first : first + length] for first in range(0, count * length, length)]


def outcomes(client: Client, paths: Sequence[Path], tokens: list[list[int]], scratch: Path) -> Iterator[Json]:
    """What the client makes of each checkpoint, one after the other: rows without names.

    `error` where it does not load or stops; else the `way` that worked, `dtype`, `largest` and `mean`, the
    differences of the log-probabilities of tokens to our decoder's, and `equal`, the share of weights of
    linears and tables that are the same numbers, rounded to that dtype.
    """
    outs = {str(scratch / f"{client.name}-{place}.npz"): path for place, path in enumerate(paths)}
    jobs = [{"model": str(path), "ways": client.ways, "out": out} for out, path in outs.items()]
    listed = scratch / "jobs.json"
    listed.write_text(json.dumps({"tokens": tokens, "seconds": SECONDS, "jobs": jobs}), encoding="utf-8")
    command = [str(client.python()), str(client.driver), str(listed)]
    with (
        (scratch / f"{client.name}.log").open("a", encoding="utf-8") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as running,
    ):
        assert running.stdout is not None
        for line in running.stdout:
            if not line.startswith('{"out"'):
                continue  # of the client itself
            said = json.loads(line)
            if said["error"] is not None:
                path = outs[said["out"]]
                yield {"error": said["error"].replace(str(path), path.name)}
                continue
            with np.load(said["out"]) as answer:
                yield {"way": said["way"]} | _compared(answer, open_checkpoint(outs[said["out"]]), tokens)
            Path(said["out"]).unlink()
    if running.returncode != 0:
        raise click.ClickException(f"{client.name} ended with {running.returncode}; {log.name} says why")


def _compared(answer: Mapping[str, np.ndarray], checkpoint: Checkpoint, tokens: list[list[int]]) -> Json:
    decoder = qconvert.load_runtime(checkpoint)
    ids_WT = torch.tensor(tokens)
    logits_WTV = decoder.logits(decoder.hidden(ids_WT))[:, :-1].double()
    ours_WT = logits_WTV.log_softmax(-1).gather(-1, ids_WT[:, 1:, None])[..., 0].numpy()
    apart_WT = np.abs(answer["logprobs"] - ours_WT)
    dtype = str(answer["dtype"])
    row: Json = {"dtype": dtype, "largest": _short(apart_WT.max()), "mean": _short(apart_WT.mean())}
    theirs = {key.removeprefix("weight:"): answer[key] for key in answer if key.startswith("weight:")}
    equal = total = 0
    probes = {key.removeprefix("probe:"): float(answer[key]) for key in answer if key.startswith("probe:")}
    for name, weight_OI in _weights(checkpoint, theirs, _DTYPES.get(dtype, DType.F32), probes):
        equal += int((theirs[name] == weight_OI).sum())
        total += weight_OI.size
    return row | ({"equal": equal / total} if total else {})


def _weights(
    checkpoint: Checkpoint, modules: Iterable[str], dtype: DType, probes: Mapping[str, float]
) -> Iterator[tuple[str, np.ndarray]]:
    """Our numbers float32 [O, I] of a client's modules, whichever of them and of ours are stacked.

    Those of `probes` are multiplied by a number before they are rounded to the dtype.
    """
    fused = checkpoint.architecture.fused
    stored: dict[str, tuple[ModelTensor, range]] = {}
    for name, tensor in checkpoint.tensors.items():
        stored[name] = tensor, range(tensor.rows)
        if name in fused:
            runs = zip(fused[name].runs, fused[name].rows, strict=True)
            stored |= {fused[name].members[run.member].name: (tensor, rows) for run, rows in runs}
    for module in modules:
        whole = f"{module}.weight"
        members = fused[whole].members if whole in fused else ()
        names = [whole] if whole in stored else [part.name for part in members]
        parts = [stored[name] for name in names if name in stored]
        if parts and len(parts) == len(names):
            values = [checkpoint.reader.read(tensor, rows.start, rows.stop) for tensor, rows in parts]
            yield module, np.concatenate([_answered(value, dtype, probes.get(module, 1)) for value in values])


def _answered(value: Value, dtype: DType, probe: float) -> np.ndarray:
    """The weights of a value times a number, rounded once: float32 [rows, columns]."""
    if probe == 1:
        rounded = numbers(value, dtype)
    else:
        assert isinstance(value, CodebookRows)  # FP8 with a scale for each row
        codes_RI = TABLES[value.encoding.table][value.codes_RI]
        times_RI = np.float32(probe) * codes_RI * column_scales(value)
        rounded = cast(DenseRows(times_RI, DType.F32), dtype)[0]
    return cast(rounded, DType.F32)[0].rows_RI


def _short(number: float) -> float:
    return float(f"{number:.2g}")


def verdicts(loader: str, paths: Sequence[Path]) -> list[Json]:
    """What `qconvert check` says of each checkpoint for a loader on a CPU."""
    device = ["--device", "cpu"]
    command = [
        sys.executable,
        "-m",
        "qconvert",
        "check",
        *map(str, paths),
        "--for",
        loader,
        *device,
        "--json",
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    told = json.loads(ran.stdout)
    return list(told["models"]) if "models" in told else [told]


@click.group()
def clients() -> None:
    """Run the loaders on what qconvert writes."""


_named = click.argument("names", nargs=-1, type=click.Choice([client.name for client in CLIENTS]))


@clients.command("install")
@_named
def install_command(names: Sequence[str]) -> None:
    """Make the environments of these clients, or of all."""
    for client in CLIENTS:
        if not names or client.name in names:
            install(client)
            click.echo(f"{client.name}: {client.python()}")


@clients.command("run")
@_named
@click.option("--only", default="", help="Subjects whose names match this regular expression.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Keep what is made here for reuse.")
@click.option("-o", "--out", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def run_command(names: Sequence[str], only: str, folder: Path | None, out: Path) -> None:
    """Measure, and write the figures as JSON; rows of clients and subjects that are not asked for stay."""
    with tempfile.TemporaryDirectory() as scratch:
        asked = [client for client in CLIENTS if not names or client.name in names]
        for client in asked:
            if client.python() is None:
                click.echo(f"{client.name}: not installed (python -m evals.clients install {client.name})")
                continue
            mine = [each for each in subjects() if client.name in each.clients and re.search(only, each.name)]
            used = versions(client)
            for row in measured(client, mine, folder or Path(scratch), Path(scratch)):
                record(out, used, row)
                click.echo(json.dumps(row))


def measured(client: Client, chosen: Sequence[Subject], folder: Path, scratch: Path) -> Iterator[Json]:
    """The rows of one client: outcome beside what `check` says."""
    folder.mkdir(parents=True, exist_ok=True)
    by_name = {each.name: each for each in subjects()}
    for each in chosen:
        _made(each, by_name, folder)
    paths = [path_of(each.name, folder) for each in chosen]
    said = verdicts(client.loader, paths) if client.loader else [{} for _ in paths]
    for each, told, row in zip(chosen, said, outcomes(client, paths, windows(MODEL), scratch), strict=True):
        lacks = [] if _has_amx() else [AMX]
        yield {
            "subject": each.name,
            "client": client.name,
            "lacks": lacks,
            **row,
            **(_said(told) if told else {}),
        }


def _has_amx() -> bool:
    """Whether this CPU multiplies tiles, which some of vLLM's kernels want."""
    info = Path("/proc/cpuinfo")
    return info.exists() and "amx_tile" in info.read_text(encoding="utf-8")


def _said(told: Json) -> Json:
    """What of an answer of `qconvert check` stands in a row."""
    warnings = [p["fact"] for p in told["problems"] if p["severity"] in ("error", "warning")]
    return {"check": told["verdict"], "needs": told["needs"], "warnings": warnings}


def _made(subject: Subject, by_name: Mapping[str, Subject], folder: Path) -> None:
    """Write a subject, and before it what it is made of."""
    if subject.source:
        _made(by_name[subject.source], by_name, folder)
    make(subject, str(MODEL), folder)


def record(out: Path, used: Mapping[str, str], row: Json) -> None:
    """Put a row into the file, in place of an earlier one of the same client and subject.

    `used` are the versions of what the client consists of.
    """
    old = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"versions": {}, "rows": []}
    mine = row["client"], row["subject"]
    order = {each.name: place for place, each in enumerate(subjects())}
    known = [each for each in old["rows"] if each["subject"] in order]
    kept = [each for each in known if (each["client"], each["subject"]) != mine]
    every = sorted([*kept, row], key=lambda each: (order[each["subject"]], each["client"]))
    said = {"model": MODEL_NAME, "windows": WINDOWS, "length": LENGTH, "qconvert": qconvert.__version__}
    those = dict(sorted({**old["versions"], row["client"]: used}.items()))
    text = json.dumps({**said, "versions": those, "rows": every}, indent=1)
    out.write_text(text + "\n", encoding="utf-8")


@clients.command("recheck")
@_named
@click.option("--only", default="", help="Subjects whose names match this regular expression.")
@click.option("--dir", "folder", type=click.Path(path_type=Path), help="Keep what is made here for reuse.")
def recheck_command(names: Sequence[str], only: str, folder: Path | None) -> None:
    """Ask `qconvert check` again about what was measured, after its rules changed; runs no client."""
    figures = json.loads(RESULTS.read_text(encoding="utf-8"))
    by_name = {each.name: each for each in subjects()}
    with tempfile.TemporaryDirectory() as scratch:
        made = folder or Path(scratch)
        made.mkdir(parents=True, exist_ok=True)
        for client in CLIENTS:
            old = [row for row in figures["rows"] if row["client"] == client.name]
            mine = [row for row in old if row["subject"] in by_name and re.search(only, row["subject"])]
            if not client.loader or not mine or (names and client.name not in names):
                continue
            for row in mine:
                _made(by_name[row["subject"]], by_name, made)
            paths = [path_of(row["subject"], made) for row in mine]
            for row, told in zip(mine, verdicts(client.loader, paths), strict=True):
                record(RESULTS, figures["versions"][client.name], row | _said(told))


@clients.command("table")
@click.option("--write", is_flag=True, help="Put them into the page.")
def table_command(write: bool) -> None:
    """Print the tables of docs/reference/clients.md."""
    lines = "\n".join(tables(json.loads(RESULTS.read_text(encoding="utf-8"))))
    if not write:
        click.echo(lines)
        return
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition("<!-- clients -->\n")
    after = rest[rest.index("<!-- end of clients -->") :]
    PAGE.write_text(f"{before}{begin}{lines}\n{after}", encoding="utf-8")


if __name__ == "__main__":
    clients()
