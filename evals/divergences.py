"""Measures files beside the model they were made from, token by token, so that files are paired too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qconvert.checkpoint.hub import resolve
from qconvert.checkpoint.open import open_checkpoint
from qconvert.evaluate.corpora import load_text
from qconvert.evaluate.lockstep import EvalModel, Track, run_lockstep
from qconvert.evaluate.measure import text_named
from qconvert.evaluate.models import open_model
from qconvert.evaluate.paired_statistics import Estimate, mean
from qconvert.evaluate.protocols import protocol_named
from qconvert.formats.tokenizers.tokenized_text import tokenize


@dataclass(frozen=True, slots=True)
class Divergences:
    """KL(model || file) in nats of every scored token, float32 [N] by file, and the window of each token."""

    by_path: dict[Path, np.ndarray]
    window_N: np.ndarray
    models: dict[Path, EvalModel]

    def mean(self, path: Path) -> Estimate:
        """The mean of a file, its error clustered by window."""
        return mean(self.by_path[path], self.window_N)

    def difference(self, a: Path, b: Path) -> Estimate:
        """By how much the mean of `a` is above that of `b`, with the error of paired tokens."""
        return mean(self.by_path[a] - self.by_path[b], self.window_N)


def divergences(model: str, paths: Sequence[Path], text: str, context: int, chunks: int) -> Divergences:
    """Those of `eval perplexity PATHS --reference MODEL --text TEXT --context N --chunks N`."""
    folder, rules = resolve(model).path, protocol_named("gptq2048", context)
    with text_named(text) as source:
        tokens = tokenize(load_text(source, rules.wikitext), folder)
    ids_N = tokens.ids_N if not rules.bos or tokens.bos is None else np.append([tokens.bos], tokens.ids_N)
    windows = rules.windows(len(ids_N))[:chunks]
    opened = {path: open_model(open_checkpoint(path), path.name) for path in paths}
    tracks = [Track(each) for each in (open_model(open_checkpoint(folder), "reference"), *opened.values())]
    run_lockstep(tracks, ids_N, windows, compared=True, bos=tokens.bos if rules.bos else None)
    window_N = np.repeat(np.arange(len(windows)), [window.stop - window.scored for window in windows])
    found = {path: np.concatenate(track.kl) for path, track in zip(paths, tracks[1:], strict=True)}
    return Divergences(found, window_N, opened)
