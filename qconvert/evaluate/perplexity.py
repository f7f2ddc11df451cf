"""Measures perplexity, KL divergence and top-1 agreement of models, side by side on the same tokens.

Losses are summed in float64 from float32 logits over all rows of the head; every comparison with
the reference is paired, every standard error clustered by window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from qconvert.errors import BadRecipe
from qconvert.evaluate.corpora import WIKITEXT, load_text
from qconvert.evaluate.in_turn import LayersInTurn, Within, fit
from qconvert.evaluate.lockstep import (
    EvalModel,
    Progress,
    Run,
    Track,
    batches_of,
    run_in_memory,
    run_lockstep,
)
from qconvert.evaluate.models import calibrated_on
from qconvert.evaluate.paired_statistics import divergence, exp_mean, mean, root_mean_square
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import LEAST_CONTEXT, Protocol, Window, protocol_named
from qconvert.evaluate.provenance import now
from qconvert.evaluate.ranks import Share
from qconvert.evaluate.records import Comparison, ModelResult
from qconvert.evaluate.saved_reference import Conditions, ReferenceRecorder, SavedModel, SavedReference
from qconvert.evaluate.scores import fingerprint, load_scores, save_scores
from qconvert.formats.tokenizers.prompts import check_ids
from qconvert.formats.tokenizers.tokenized_text import Text, Tokens, check_tokenizer, tokenize
from qconvert.runtime.run_info import arithmetic, device_name, versions


def run(
    models: Sequence[EvalModel],
    *,
    reference: EvalModel | SavedReference | None,
    tokenizer: Path,
    text: Text | str | Path = WIKITEXT,
    protocol: str = "gptq2048",
    context: int | None = None,
    max_chunks: int | None = None,
    noise_floor: bool = False,
    progress: Progress | None = None,
    scores: Path | None = None,
    resume: bool = False,
    save_reference: Path | None = None,
    within: Within | None = None,
    share: Share | None = None,
) -> PerplexityReport:
    """Evaluate models on a text, both given by name as on a command line.

    `tokenizer` is a folder with a tokenizer.json; `text` a UTF-8 file, `wikitext2`, or a loaded
    text; `context` replaces the protocol's own window. The rest is as in `evaluate`. Raises BadRecipe
    for a model whose own tokenizer cuts the text into other tokens.
    """
    rules = protocol_named(protocol, context)
    tokens = tokenize(text if isinstance(text, Text) else load_text(text, rules.wikitext), tokenizer)
    for model in _all(models, reference):
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
        save_reference=save_reference,
        within=within,
        share=share,
    )


def _all(models: Sequence[EvalModel], reference: EvalModel | SavedReference | None) -> list[EvalModel]:
    """The models that are run, the reference first."""
    return [*([reference] if isinstance(reference, EvalModel) else []), *models]


def evaluate(
    models: Sequence[EvalModel],
    reference: EvalModel | SavedReference | None,
    tokens: Tokens,
    protocol: Protocol,
    *,
    max_chunks: int | None = None,
    batch_tokens: int | None = None,
    noise_floor: bool = False,
    progress: Progress | None = None,
    scores: Path | None = None,
    resume: bool = False,
    save_reference: Path | None = None,
    within: Within | None = None,
    share: Share | None = None,
) -> PerplexityReport:
    """Measure every model on the text; in the report the reference comes first, then the largest.

    `max_chunks` stops after that many windows; `batch_tokens` is the number of tokens that visit a
    layer together; `noise_floor` also compares the reference with itself under another batch size.
    Where `scores` names a file, Ctrl-C yields the report of the windows done and leaves their scores
    there; `resume` goes on from such a file. `save_reference` names a file for what the reference says of
    every token (of the first model, where there is no reference); an evaluation that is interrupted leaves
    none. With `within`, models that were opened `in_turn` are run within a memory. With a `share`, other
    processes score windows, too; Published is raised when one of them has written the report. Raises
    BadRecipe for a memory too small, a text too short, models of unlike vocabularies, or a saved reference of
    another text; CheckFailed for a model whose loss is no number.
    """
    all_models = _all(models, reference)
    _check_vocabulary(all_models, tokens)
    bos = tokens.bos if protocol.bos else None
    ids_N = tokens.ids_N if bos is None else np.concatenate(([bos], tokens.ids_N))
    windows = protocol.windows(len(ids_N))[:max_chunks]
    tracks = [Track(model) for model in all_models]
    runs = isinstance(reference, EvalModel)
    echoes = [Track(all_models[0], echo=True)] if runs and noise_floor else []
    all_tracks = [*tracks, *echoes]
    rules = [protocol.label, tokens.text.sha256, tokens.tokenizer_sha256, str(len(windows))]
    rules += [model.activations for model in all_models if model.activations != "exact"]
    conditions = Conditions.of(tokens, protocol, bos, all_models[0].decoder.config.vocab)
    saved = reference if isinstance(reference, SavedReference) else None
    if saved is not None:
        saved.require(conditions, windows)
        rules.append(saved.mark)
    mark = fingerprint(all_tracks, *rules)
    before = load_scores(scores, all_tracks, mark) if scores is not None and resume else 0
    how: Run = run_in_memory
    if within is not None:
        saves = saved is not None or save_reference is not None
        how = fit(within, all_tracks, windows[before:], batch_tokens=batch_tokens, saves=saves)
    lockstep = partial(
        run_lockstep, ids_N=ids_N, compared=runs, bos=bos, batch_tokens=batch_tokens, saved=saved, run=how
    )
    with _recorder(save_reference, tracks[0], conditions, windows) as recorder:
        if share is None:
            done = lockstep(all_tracks, windows=windows, progress=progress, done=before, recorder=recorder)
        else:
            batches = list(batches_of(all_tracks, windows, batch_tokens))
            in_turn = within is not None
            done = share.run(all_tracks, windows, batches, lockstep, mark, in_turn=in_turn, progress=progress)
        if recorder is not None and done == len(windows):
            recorder.finish(tracks[0])
    if done < len(windows):
        if scores is None:
            raise KeyboardInterrupt
        save_scores(scores, all_tracks, done, mark)
    elif scores is not None:
        scores.unlink(missing_ok=True)
    window_N = np.repeat(np.arange(done), [window.stop - window.scored for window in windows[:done]])
    base = _Base.of(tracks[0]) if runs else None if saved is None else _Base.of_saved(saved, len(window_N))
    shared = _Evaluation(tokens, protocol, windows[:done], len(windows), base, window_N)
    report = _report(shared, tracks, echoes, saved)
    if within is None or not isinstance(how, LayersInTurn):
        return report
    return replace(report, memory=within.use(how.memory))


@contextmanager
def _recorder(
    path: Path | None, track: Track, conditions: Conditions, windows: Sequence[Window]
) -> Iterator[ReferenceRecorder | None]:
    """What saves the reference, if that is wanted; nothing is left where it was not finished."""
    if path is None:
        yield None
        return
    model = track.model
    least_rows = min(window.stop - window.start for window in windows)
    words = arithmetic(model.decoder, least_rows)
    known = SavedModel(model.label, model.size_bytes, model.bits_per_weight, words, model.origin)
    recorder = ReferenceRecorder(path, known, conditions, windows)
    try:
        yield recorder
    finally:
        recorder.abort()


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
class _Base:
    """What the others are compared with: its label, losses and likeliest tokens."""

    label: str
    nll_N: np.ndarray
    top_N: np.ndarray

    @staticmethod
    def of(track: Track) -> _Base:
        return _Base(track.model.label, np.concatenate(track.nll), np.concatenate(track.top))

    @staticmethod
    def of_saved(saved: SavedReference, tokens: int) -> _Base:
        return _Base(saved.model.label, *saved.scores(tokens))


@dataclass(frozen=True, slots=True)
class _Evaluation:
    """The inputs that all figures of a report share: tokens, finished windows of `planned` ones, the
    reference's scores, and the window of every token that counts."""

    tokens: Tokens
    protocol: Protocol
    windows: Sequence[Window]
    planned: int
    base: _Base | None
    window_N: np.ndarray

    @property
    def tokens_per_byte(self) -> float:
        return len(self.tokens.ids_N) / self.tokens.text.nbytes


def _report(
    evaluation: _Evaluation, tracks: Sequence[Track], echoes: Sequence[Track], saved: SavedReference | None
) -> PerplexityReport:
    tokens, base = evaluation.tokens, evaluation.base
    first, compared = [], tracks
    if saved is not None:
        first = [_saved_result(saved, evaluation)]
    elif base is not None:
        first, compared = [_model_result(tracks[0], evaluation, compared=False)], tracks[1:]
    found = [_model_result(track, evaluation, compared=base is not None) for track in compared]
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
        reference=None if base is None else base.label,
        models=(*first, *sorted(found, key=lambda model: -model.size_bytes)),
        noise_floor=_compare(echoes[0], base, evaluation.window_N) if base and echoes else None,
        environment={**versions(), "device": device_name(tracks[0].model.decoder)},
        notes=(
            *_notes(evaluation, min(track.model.decoder.config.max_positions for track in tracks)),
            *_flattered(tracks, tokens.text),
        ),
        date=now(),
        saved_reference=None if saved is None else str(saved.path),
    )


def _model_result(track: Track, evaluation: _Evaluation, *, compared: bool) -> ModelResult:
    nll_N, window_N = np.concatenate(track.nll), evaluation.window_N
    least_rows = min(window.stop - window.start for window in evaluation.windows)
    base = evaluation.base if compared else None
    return ModelResult(
        label=track.model.label,
        size_bytes=track.model.size_bytes,
        bits_per_weight=track.model.bits_per_weight,
        arithmetic=arithmetic(track.model.decoder, least_rows, track.model.activations),
        activations=track.model.activations,
        perplexity=exp_mean(nll_N, window_N),
        bits_per_byte=float(nll_N.mean()) / math.log(2) * evaluation.tokens_per_byte,
        tokens_per_second=track.tokens / track.seconds,
        versus=None if base is None else _compare(track, base, window_N),
        origin=track.model.origin,
    )


def _saved_result(saved: SavedReference, evaluation: _Evaluation) -> ModelResult:
    """The row of a reference that was run before; its speed is that of then."""
    assert evaluation.base is not None
    model, nll_N = saved.model, evaluation.base.nll_N
    return ModelResult(
        label=model.label,
        size_bytes=model.size_bytes,
        bits_per_weight=model.bits_per_weight,
        arithmetic=model.arithmetic,
        perplexity=exp_mean(nll_N, evaluation.window_N),
        bits_per_byte=float(nll_N.mean()) / math.log(2) * evaluation.tokens_per_byte,
        tokens_per_second=saved.tokens_per_second,
        versus=None,
        origin=model.origin,
    )


def _compare(track: Track, base: _Base, window_N: np.ndarray) -> Comparison:
    nll_N, base_N = np.concatenate(track.nll), base.nll_N
    same_N = np.concatenate(track.top) == base.top_N
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
