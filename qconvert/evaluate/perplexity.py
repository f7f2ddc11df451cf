"""Measures perplexity, KL divergence and top-1 agreement of models, side by side on the same tokens.

Losses are summed in float64 from float32 logits over all rows of the head; every comparison with
the reference is paired, every standard error clustered by window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qconvert.errors import BadRecipe
from qconvert.evaluate.corpora import WIKITEXT, load_text
from qconvert.evaluate.lockstep import EvalModel, Progress, Track, run_lockstep
from qconvert.evaluate.models import calibrated_on
from qconvert.evaluate.paired_statistics import divergence, exp_mean, mean, root_mean_square
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import LEAST_CONTEXT, Protocol, Window, protocol_named
from qconvert.evaluate.records import Comparison, ModelResult
from qconvert.evaluate.scores import fingerprint, load_scores, save_scores
from qconvert.formats.tokenizers.prompts import check_ids
from qconvert.formats.tokenizers.tokenized_text import Text, Tokens, check_tokenizer, tokenize
from qconvert.runtime.run_info import arithmetic, device_name, versions


def run(
    models: Sequence[EvalModel],
    *,
    reference: EvalModel | None,
    tokenizer: Path,
    text: Text | str | Path = WIKITEXT,
    protocol: str = "gptq2048",
    context: int | None = None,
    max_chunks: int | None = None,
    noise_floor: bool = False,
    progress: Progress | None = None,
    scores: Path | None = None,
    resume: bool = False,
) -> PerplexityReport:
    """Evaluate models on a text, both given by name as on a command line.

    `tokenizer` is a folder with a tokenizer.json; `text` a UTF-8 file, `wikitext2`, or a loaded
    text; `context` replaces the protocol's own window. The rest is as in `evaluate`. Raises BadRecipe
    for a model whose own tokenizer cuts the text into other tokens.
    """
    rules = protocol_named(protocol, context)
    tokens = tokenize(text if isinstance(text, Text) else load_text(text, rules.wikitext), tokenizer)
    for model in [*([reference] if reference else []), *models]:
        if model.path is not None:
            check_tokenizer(tokens, model.label, model.path)
    return evaluate(
        models,
        reference,
        tokens,
        rules,
        max_chunks=max_chunks,
        noise_floor=noise_floor,
        progress=progress,
        scores=scores,
        resume=resume,
    )


def evaluate(
    models: Sequence[EvalModel],
    reference: EvalModel | None,
    tokens: Tokens,
    protocol: Protocol,
    *,
    max_chunks: int | None = None,
    batch_tokens: int | None = None,
    noise_floor: bool = False,
    progress: Progress | None = None,
    scores: Path | None = None,
    resume: bool = False,
) -> PerplexityReport:
    """Measure every model on the text; the reference, if there is one, comes first in the report.

    `max_chunks` stops after that many windows; `batch_tokens` is the number of tokens that visit a
    layer together; `noise_floor` also compares the reference with itself under another batch size.
    Where `scores` names a file, Ctrl-C yields the report of the windows done and leaves their scores
    there; `resume` goes on from such a file. Raises BadRecipe for a text too short or models of
    unlike vocabularies, CheckFailed for a model whose loss is no number.
    """
    all_models = [*([reference] if reference else []), *models]
    _check_vocabulary(all_models, tokens)
    bos = tokens.bos if protocol.bos else None
    ids_N = tokens.ids_N if bos is None else np.concatenate(([bos], tokens.ids_N))
    windows = protocol.windows(len(ids_N))[:max_chunks]
    tracks = [Track(model) for model in all_models]
    echoes = [Track(reference, echo=True)] if reference and noise_floor else []
    all_tracks = [*tracks, *echoes]
    rules = (protocol.label, tokens.text.sha256, tokens.tokenizer_sha256, str(len(windows)))
    mark = fingerprint(all_tracks, *rules)
    before = load_scores(scores, all_tracks, mark) if scores is not None and resume else 0
    done = run_lockstep(
        all_tracks,
        ids_N,
        windows,
        compared=reference is not None,
        bos=bos,
        batch_tokens=batch_tokens,
        progress=progress,
        done=before,
    )
    if done < len(windows):
        if scores is None:
            raise KeyboardInterrupt
        save_scores(scores, all_tracks, done, mark)
    elif scores is not None:
        scores.unlink(missing_ok=True)
    base = tracks[0] if reference else None
    window_N = np.repeat(np.arange(done), [window.stop - window.scored for window in windows[:done]])
    shared = _Evaluation(tokens, protocol, windows[:done], len(windows), base, window_N)
    return _report(shared, tracks, echoes)


def _check_vocabulary(models: Sequence[EvalModel], tokens: Tokens) -> None:
    if not models:
        raise BadRecipe("eval: no model given", "name at least one checkpoint")
    sizes = {model.label: model.decoder.config.vocab for model in models}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{label} has {vocab}" for label, vocab in sizes.items())
        raise BadRecipe(f"vocabularies differ: {listed}", "compare models that share one tokenizer")
    largest, rows = max(int(tokens.ids_N.max(initial=0)), tokens.bos or 0), min(sizes.values())
    check_ids(largest, rows)


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The inputs that all figures of a report share: tokens, finished windows of `planned` ones, the
    reference's scores, and the window of every token that counts."""

    tokens: Tokens
    protocol: Protocol
    windows: Sequence[Window]
    planned: int
    base: Track | None
    window_N: np.ndarray


def _report(evaluation: _Evaluation, tracks: Sequence[Track], echoes: Sequence[Track]) -> PerplexityReport:
    tokens, base = evaluation.tokens, evaluation.base
    return PerplexityReport(
        protocol=evaluation.protocol.label,
        windows=evaluation.protocol.rule,
        text=tokens.text.name,
        text_sha256=tokens.text.sha256,
        text_bytes=tokens.text.nbytes,
        tokenizer_sha256=tokens.tokenizer_sha256,
        tokens=len(tokens.ids_N),
        chunks=len(evaluation.windows),
        planned_chunks=evaluation.planned,
        scored_tokens=len(evaluation.window_N),
        reference=None if base is None else base.model.label,
        models=tuple(_model_result(track, evaluation) for track in tracks),
        noise_floor=_compare(echoes[0], base, evaluation.window_N) if base and echoes else None,
        environment={**versions(), "device": device_name(tracks[0].model.decoder)},
        notes=(
            *_notes(evaluation, min(track.model.decoder.config.max_positions for track in tracks)),
            *_flattered(tracks, tokens.text),
        ),
    )


def _model_result(track: Track, evaluation: _Evaluation) -> ModelResult:
    nll_N, window_N = np.concatenate(track.nll), evaluation.window_N
    tokens_per_byte = len(evaluation.tokens.ids_N) / evaluation.tokens.text.nbytes
    base = evaluation.base
    least_rows = min(window.stop - window.start for window in evaluation.windows)
    return ModelResult(
        label=track.model.label,
        size_bytes=track.model.size_bytes,
        bits_per_weight=track.model.bits_per_weight,
        arithmetic=arithmetic(track.model.decoder, least_rows),
        perplexity=exp_mean(nll_N, window_N),
        bits_per_byte=float(nll_N.mean()) / math.log(2) * tokens_per_byte,
        tokens_per_second=track.tokens / track.seconds,
        versus=None if base is None or track is base else _compare(track, base, window_N),
    )


def _compare(track: Track, base: Track, window_N: np.ndarray) -> Comparison:
    nll_N, base_N = np.concatenate(track.nll), np.concatenate(base.nll)
    same_N = np.concatenate(track.top) == np.concatenate(base.top)
    return Comparison(
        perplexity_ratio=exp_mean(nll_N - base_N, window_N),
        kl=divergence(np.concatenate(track.kl), window_N),
        top1_agreement=mean(same_N.astype(float), window_N),
        rms_delta_p=root_mean_square(np.exp(-nll_N) - np.exp(-base_N), window_N),
    )


def _flattered(tracks: Sequence[Track], text: Text) -> list[str]:
    """What to say of models that were calibrated on the very text that they are measured on."""
    labels = [t.model.label for t in tracks if text.sha256 in calibrated_on(t.model.path)]
    return [f"{label} was calibrated on this text, which flatters it" for label in labels]


def _notes(evaluation: _Evaluation, positions: int) -> tuple[str, ...]:
    notes, context = [], evaluation.protocol.context
    if len(evaluation.windows) < evaluation.planned:
        notes.append(f"interrupted after {len(evaluation.windows)} of {evaluation.planned} chunks")
    if len(evaluation.windows) < 2:
        least = max(LEAST_CONTEXT, context // 8)
        shorter = f"--context {least}" if least < context else "a longer text"
        notes.append(f"one chunk gives no error estimate; try {shorter}")
    if context > positions:
        notes.append(f"windows of {context} tokens exceed the {positions} positions of the model")
    return tuple(notes)
