"""Keeps what a reference says of a text, so that models can be compared with it later, without it.

The file is a safetensors file. Of each of N tokens that count it holds the log-probabilities of all V words
as 16-bit codes on an even grid (`low + step * code`) from the likeliest word's down to the least likely
one's, but at most 32 nats; its loss and its likeliest token exactly; and the windows. A step is at most 32
/ 65535 = 4.9e-4 nats, so renormalised probabilities move a divergence by E[e^2] / 2 < 1e-8 nats plus terms
whose signs are random and which vanish in the mean. Losses, ratios and agreements are not touched.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qconvert.core.dtypes import DType, TensorSpec
from qconvert.errors import BadRecipe, QConvertError
from qconvert.evaluate.lockstep import Track
from qconvert.evaluate.plain_data import from_plain
from qconvert.evaluate.protocols import Protocol, Window
from qconvert.evaluate.records import Origin
from qconvert.formats.huggingface.safetensors_file import SafetensorsFile
from qconvert.formats.huggingface.safetensors_plan import plan_files
from qconvert.formats.io.local_file import claim, create, flush, octets, require_free_disk, write_exactly
from qconvert.formats.tokenizers.tokenized_text import Tokens
from qconvert.runtime.scoring import Outputs, Scores, score

METADATA = "qconvert.reference"
FORMAT_VERSION = 1
_LEVELS = 65535
_MOST_NATS = 32.0
"""Words less likely than the likeliest by more than this have no weight in a divergence (e^-32 = 1e-14)."""
_ELEMENTS = 1 << 22
"""Log-probabilities that are held at a time."""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a reference was run on: enough to refuse a comparison of unlike things.

    `ids_sha256` is of the token ids, which say more than the hash of a tokenizer: other spellings of one
    tokenizer cut a text alike.
    """

    protocol: str
    text: str
    text_sha256: str
    tokenizer_sha256: str
    ids_sha256: str
    bos: int | None
    vocab: int

    @staticmethod
    def of(tokens: Tokens, protocol: Protocol, bos: int | None, vocab: int) -> Conditions:
        ids = hashlib.sha256(octets(np.ascontiguousarray(tokens.ids_N, np.int64))).hexdigest()
        text = tokens.text
        return Conditions(protocol.label, text.name, text.sha256, tokens.tokenizer_sha256, ids, bos, vocab)


@dataclass(frozen=True, slots=True)
class SavedModel:
    """The reference itself, as its row of a report needs it."""

    label: str
    size_bytes: int
    bits_per_weight: float
    arithmetic: str
    origin: Origin | None


class ReferenceRecorder:
    """Writes the file of a reference while it runs; `finish` gives it its name, `abort` leaves nothing."""

    def __init__(
        self, path: Path, model: SavedModel, conditions: Conditions, windows: Sequence[Window]
    ) -> None:
        tokens = sum(window.stop - window.scored for window in windows)
        record = {"version": FORMAT_VERSION, "model": asdict(model), "conditions": asdict(conditions)}
        specs = [
            TensorSpec("codes", DType.U16, (tokens, conditions.vocab)),
            TensorSpec("low", DType.F32, (tokens,)),
            TensorSpec("step", DType.F32, (tokens,)),
            TensorSpec("nll", DType.F64, (tokens,)),
            TensorSpec("top", DType.I64, (tokens,)),
            TensorSpec("windows", DType.I64, (len(windows), 3)),
            TensorSpec("tokens_per_second", DType.F64, (1,)),
        ]
        (plan,) = plan_files(specs, metadata={METADATA: json.dumps(record)})
        require_free_disk(path, plan.size)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.beside = path, path.with_name(f"{path.name}.partial")
        self.plan = replace(plan, name=path.name)
        self.windows = np.array([[w.start, w.stop, w.scored] for w in windows], np.int64)
        self._lock = claim(self.beside)
        try:
            self._fd = create(self.beside, plan.size, claimed=True)
        except BaseException:
            os.close(self._lock)
            raise
        write_exactly(self._fd, memoryview(plan.head), 0, path.name)

    def add(self, outputs: Outputs, first: int) -> None:
        """Take in what the reference says of the tokens that count from the `first` on."""
        vocab = self.plan.specs["codes"].width
        rows = max(1, _ELEMENTS // vocab)
        for start in range(0, len(outputs.h_ND), rows):
            some = outputs._replace(h_ND=outputs.h_ND[start : start + rows])
            codes_NV, low_N, step_N = encoded(some.logits(0, vocab))
            at = first + start
            for name, array in (("codes", codes_NV), ("low", low_N), ("step", step_N)):
                self._write(name, array, at)

    def finish(self, track: Track) -> None:
        """Write what is known at the end, and give the file its name."""
        self._write("nll", np.concatenate(track.nll))
        self._write("top", np.concatenate(track.top))
        self._write("windows", self.windows)
        self._write("tokens_per_second", np.array([track.tokens / track.seconds]))
        flush(self._fd, self.path.name)
        self.beside.replace(self.path)
        self._close()

    def abort(self) -> None:
        """Leave nothing; after `finish`, do nothing."""
        if self._fd >= 0:
            with suppress(FileNotFoundError):
                self.beside.unlink()
            self._close()

    def _close(self) -> None:
        os.close(self._fd)
        os.close(self._lock)
        self._fd = -1

    def _write(self, name: str, array: np.ndarray, row: int = 0) -> None:
        spec = self.plan.specs[name]
        data = np.ascontiguousarray(array, spec.dtype.carrier)
        offset = self.plan.offsets[name] + row * spec.width * spec.dtype.nbytes
        write_exactly(self._fd, octets(data), offset, self.path.name)


def encoded(logits_NV: Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log-probabilities of logits as codes uint16 [N, V], with `low` and `step` float32 [N]."""
    log_p_NV = logits_NV.log_softmax(-1)
    top_N = log_p_NV.amax(-1)
    low_N = torch.maximum(log_p_NV.amin(-1), top_N - _MOST_NATS)
    step_N = ((top_N - low_N) / _LEVELS).clamp_min(1e-12)
    codes_NV = log_p_NV.sub_(low_N[:, None]).div_(step_N[:, None]).round_().clamp_(0, _LEVELS)
    return codes_NV.to(torch.int32).cpu().numpy().astype("<u2"), low_N.cpu().numpy(), step_N.cpu().numpy()


class SavedReference:
    """A saved reference, opened: its conditions, its own figures, and scores of models against it."""

    def __init__(self, path: Path) -> None:
        """Raises BadRecipe for a file that is none, CorruptCheckpoint for a damaged one."""
        self.path, self._file = path, SafetensorsFile(path)
        specs = self._file.header.specs
        try:
            record = json.loads(self._file.header.metadata[METADATA])
            self.model = from_plain(SavedModel, record["model"])
            self.conditions = from_plain(Conditions, record["conditions"])
            tokens, vocab = specs["codes"].shape
            shapes = {"low": (tokens,), "step": (tokens,), "nll": (tokens,), "top": (tokens,)}
            if vocab != self.conditions.vocab or any(specs[n].shape != s for n, s in shapes.items()):
                raise ValueError("shapes that do not belong together")
            self.windows = [Window(*map(int, row)) for row in self._whole("windows").reshape(-1, 3)]
            self.tokens_per_second = float(self._whole("tokens_per_second")[0, 0])
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadRecipe(
                f"{path}: is not a saved reference ({error})", "make one with --save-reference FILE"
            ) from error

    @property
    def mark(self) -> str:
        """What tells this file from another: conditions, model and sizes."""
        return self._file.header.header_sha256

    def scores(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The losses (float64) and likeliest tokens (int64) of the first so many tokens that count."""
        return (
            self._file.read("nll", 0, tokens)[:, 0],
            self._file.read("top", 0, tokens)[:, 0],
        )

    def require(self, wanted: Conditions, windows: Sequence[Window]) -> None:
        """Raise BadRecipe unless the reference read these windows of these tokens; it may have read on."""
        own = self.conditions
        pairs = {
            "text": (own.text_sha256[:12], wanted.text_sha256[:12]),
            "tokens (another tokenizer)": (own.ids_sha256[:12], wanted.ids_sha256[:12]),
            "protocol": (own.protocol, wanted.protocol),
            "first token": (own.bos, wanted.bos),
            "vocabulary": (own.vocab, wanted.vocab),
        }
        for what, (saved, now) in pairs.items():
            if saved != now:
                raise BadRecipe(
                    f"{self.path}: was saved with another {what}: {saved}, now {now}",
                    f"measure on {own.text} by {own.protocol}, as it was, or save the reference again",
                )
        if self.windows[: len(windows)] != list(windows):
            raise BadRecipe(
                f"{self.path}: holds {len(self.windows)} windows, of which {len(windows)} are not the first",
                f"add --chunks {len(self.windows)}, or save the reference again without --chunks",
            )

    def score(self, models: Sequence[Outputs], targets_N: Tensor, first: int) -> list[Scores]:
        """Scores of models on the tokens that count from the `first` on, with divergences from the saved."""
        vocab = self.conditions.vocab
        rows, parts = max(1, _ELEMENTS // vocab), []
        for start in range(0, len(targets_N), rows):
            stop = min(start + rows, len(targets_N))
            log_p_NV = self._log_probabilities(first + start, first + stop).to(targets_N.device)
            some = (model._replace(h_ND=model.h_ND[start:stop]).blocks() for model in models)
            parts.append(score([_Held(log_p_NV), *some], targets_N[start:stop], vocab)[1:])
        return [_joined([part[i] for part in parts]) for i in range(len(models))]

    def _log_probabilities(self, start: int, stop: int) -> Tensor:
        codes_NV = torch.from_numpy(self._file.read("codes", start, stop).astype(np.float32))
        low_N1, step_N1 = (torch.from_numpy(self._file.read(n, start, stop)) for n in ("low", "step"))
        return codes_NV.mul_(step_N1).add_(low_N1)

    def _whole(self, name: str) -> np.ndarray:
        return self._file.read(name, 0, self._file.header.specs[name].rows)


@dataclass(frozen=True, slots=True)
class _Held:
    """Logits that are there already, as the scores ask for them: by rows of the vocabulary."""

    x_NV: Tensor

    def __call__(self, start: int, stop: int) -> Tensor:
        return self.x_NV[:, start:stop]


def _joined(parts: Sequence[Scores]) -> Scores:
    kls = [part.kl_N for part in parts if part.kl_N is not None]
    return Scores(
        torch.cat([part.nll_N for part in parts]), torch.cat([part.top_N for part in parts]), torch.cat(kls)
    )


def is_saved_reference(path: Path) -> bool:
    """Whether a file is a saved reference, by its header."""
    if not path.is_file():
        return False
    try:
        with SafetensorsFile(path) as file:
            return METADATA in file.header.metadata
    except QConvertError:
        return False


def reference_bytes(tokens: int, vocab: int) -> int:
    """About the bytes of a saved reference: two per word of the vocabulary and token that counts."""
    return tokens * (2 * vocab + 24)
