"""Compares importance matrices with llama-imatrix's, and files made with ours with llama-quantize's.

Usage: python -m evals.peer_imatrix BIN OUT.json MODEL=TEXT...

BIN holds llama-imatrix and llama-quantize. Both tools read the same float32 GGUF and the same first windows
of the text; then llama-quantize and `qconvert to-gguf` write every type with our file, to be compared whole.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import Json
from qconvert.core.version import __version__
from qconvert.formats.gguf.reader import GGUFFile

WINDOWS, WINDOW = 24, 512
TYPES = ("Q2_K", "Q3_K_M", "Q4_0", "Q4_K_M", "Q5_K_M", "IQ4_NL", "IQ4_XS")


def run(*command: object) -> None:
    """Run a program that must succeed, without its talk."""
    subprocess.run([str(word) for word in command], check=True, capture_output=True)


def qconvert(*command: object) -> None:
    """Run one of our commands."""
    run(sys.executable, "-m", "qconvert", *command)


def compare(ours: Path, theirs: Path) -> Json:
    """How far sums of squares and counts are apart, over the tensors of both files."""
    errors, counts = [], True
    with GGUFFile(ours) as mine, GGUFFile(theirs) as other:
        wanted = {name for name in other.tensors if name.endswith((".in_sum2", ".counts"))}
        for name in sorted(wanted & mine.tensors.keys()):
            a, b = (file.read(name, 0, file.specs[name].rows).astype(float) for file in (mine, other))
            if name.endswith(".counts"):
                counts = counts and np.array_equal(a, b)
            else:
                errors.append(np.abs(a / b - 1).ravel())
        same_names = wanted == set(mine.tensors)
    every = np.concatenate(errors)
    return {
        "same_tensors": same_names,
        "same_counts": counts,
        "columns": len(every),
        "largest_relative_difference": float(every.max()),
        "median_relative_difference": float(np.median(every)),
    }


def measure(tools: Path, model: Path, text: Path, folder: Path) -> Json:
    """One model on one text."""
    plain, ours, theirs = (folder / name for name in ("f32.gguf", "ours.gguf", "theirs.gguf"))
    qconvert("to-gguf", model, "--type", "f32", "-o", plain)
    flags = ("-c", WINDOW, "--chunks", WINDOWS, "-t", 1, "-o", theirs)
    run(tools / "llama-imatrix", "-m", plain, "-f", text, *flags)
    qconvert("calibrate", model, "--text", text, "--tokens", WINDOW * WINDOWS, "--imatrix", ours)
    equal = []
    for name in TYPES:
        files = [folder / f"{name}-{whose}.gguf" for whose in ("theirs", "ours")]
        run(tools / "llama-quantize", "--imatrix", ours, plain, files[0], name, 1)
        qconvert("to-gguf", model, "--type", name, "--calibration", ours, "-o", files[1])
        if files[0].read_bytes() == files[1].read_bytes():
            equal.append(name)
    return {
        "model": model.name,
        "text": text.name,
        "tokens": WINDOW * WINDOWS,
        **compare(ours, theirs),
        "types": list(TYPES),
        "byte_equal": equal,
    }


def main(tools: str, out: str, *pairs: str) -> None:
    """Measure every pair and write the figures."""
    found = []
    for pair in pairs:
        model, text = map(Path, pair.split("="))
        with tempfile.TemporaryDirectory() as folder:
            found.append(measure(Path(tools), model, text, Path(folder)))
    asked = subprocess.run(
        [f"{tools}/llama-imatrix", "--version"], check=True, capture_output=True, text=True
    )
    version = next(line for line in (asked.stdout + asked.stderr).splitlines() if "version" in line)
    record = {"qconvert": __version__, "llama.cpp": version, "window": WINDOW, "pairs": found}
    Path(out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
