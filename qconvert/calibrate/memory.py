"""Estimates the memory and disk that calibrated quantization needs, before anything is read.

An upper estimate of what is resident beside the process itself: in every phase of a run, all arrays that
are alive together. Legend: D hidden, I columns of an input, C of a block, N tokens of a batch, P weights of a
layer, E experts. Numbers of bytes but where said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from qconvert.calibrate import backward
from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.input_sums import MOST_HELD
from qconvert.calibrate.measure_sensitivity import MOST_SAMPLES
from qconvert.calibrate.savings import HessianForm, Savings
from qconvert.calibrate.waves import AMPLE_TOKENS, HELD_OUT_OF
from qconvert.runtime.blockwise_scores import BLOCK_ELEMENTS
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.storage import SCRATCH_BYTES

_FLOAT, _DOUBLE = 4, 8
_EXPERT = re.compile(r"\.experts\.\d+")
BACKWARD_TOKENS = backward.BATCH_TOKENS["cpu"]
BLOCK_BYTES, BLOCKS = 16 << 20, 4
"""The working memory of a block of rows, and the share of the run's memory it may take (`convert.runner`)."""
# What else a block takes while its codes are chosen together, in its working memory.
_BLOCK_SHARE = 5.0
# What allocators keep and libraries take for their own work: packed factors of a product, threads' buffers.
LIBRARIES, SLACK = 64 << 20, 1.05


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of memory beside the process itself, by phase, and of disk for activations and rows."""

    phases: Mapping[str, int]
    disk: int

    @property
    def memory(self) -> int:
        """The most that is resident at once."""
        return max(self.phases.values())


@dataclass(frozen=True, slots=True)
class Work:
    """What is calibrated: the shape of a model, the text, and how the run is set.

    `weight_bytes` is what a weight takes as it is held; `jobs` threads round blocks of rows, which take
    `rows_bytes` in all at most; `writes_table` says that the embedding is quantized too, `eights` that codes
    of eight columns may be chosen at once.
    """

    config: DecoderConfig
    calibration: Calibration
    jobs: int = 1
    weight_bytes: float = 2.0
    writes_table: bool = False
    eights: bool = False
    shapes: Mapping[tuple[str, int], tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        linears = {
            (role, layer): (shape[0], shape[1])
            for (role, layer, kind), shape in self.config.shapes.items()
            if layer is not None and kind == "weight" and len(shape) == 2
        }
        object.__setattr__(self, "shapes", linears)

    @property
    def widths(self) -> list[int]:
        """The widths of inputs, the narrowest first."""
        return sorted({width for _, width in self.shapes.values()} | {self.config.hidden})

    @property
    def window(self) -> int:
        return int(self.calibration.tokens_BT.shape[1])

    @property
    def windows(self) -> int:
        return len(self.calibration.tokens_BT)

    @property
    def layer(self) -> int:
        """The weights of the largest layer."""
        found = [0] * self.config.layers
        for (_, i), (rows, width) in self.shapes.items():
            found[i] += rows * width
        return max(found)

    @property
    def stacked(self) -> int:
        """The weights that a layer's linears of one input hold together, experts one by one."""
        alike: dict[tuple[int, str, int], int] = {}
        for (role, i), (rows, width) in self.shapes.items():
            if not role.endswith((".o", ".down")):
                key = (i, role.rsplit(".", 1)[0], width)
                alike[key] = alike.get(key, 0) + rows * width
        found = [0] * self.config.layers
        for (i, _, _), size in alike.items():
            found[i] += size
        return max(found)

    @property
    def inner(self) -> int:
        """The inner width of the MLP, of an expert where there are some."""
        return max(shape[1] for (role, _), shape in self.shapes.items() if role.endswith(".down"))

    def experts(self, width: int) -> int:
        """How many inputs of a width are summed at once: 1, or those of a layer's experts."""
        found: dict[tuple[str, int], int] = {}
        for (role, i), shape in self.shapes.items():
            if shape[1] == width and _EXPERT.search(role) and not role.endswith(".up"):
                key = _EXPERT.sub("", role), i
                found[key] = found.get(key, 0) + 1
        return max(found.values(), default=1)


def needs(work: Work, savings: Savings) -> Needs:
    """What a run takes with these savings."""
    phases = {
        "reading a batch": _batch(work, savings, attention=True),
        "summing": max(_summing(work, savings, width) for width in work.widths),
        "factoring": max(_factoring(work, savings, width) for width in work.widths),
        "rounding": max(_rounding(work, savings, width) for width in work.widths),
    }
    if work.calibration.traits.over_rows:
        phases["gradients"] = _gradients(work, savings)
        phases["sampling"] = _sampling(work, savings)
    taken = {name: round(SLACK * found) + LIBRARIES for name, found in phases.items()}
    return Needs(taken, _disk(work, savings))


def collecting(work: Work, tokens: int, *, streamed: bool) -> int:
    """What measuring mean squares takes with so many tokens in a batch: a layer in float32, and the batch."""
    weights = 3 * SCRATCH_BYTES if streamed else work.layer * (_FLOAT + work.weight_bytes / 2)
    savings = Savings(tokens)
    # Beside the batch of a layer, the squares of what its widest linear reads.
    batch = max(activations(work, savings, attention=attention) for attention in (True, False))
    squares = _tokens(work, tokens, token_wise=False) * 2 * max(work.widths) * _FLOAT
    return round(SLACK * (weights + batch + squares)) + LIBRARIES


def weighing(work: Work, savings: Savings) -> int:
    """What a backward pass takes that weighs encodings, beside the Hessians of a layer's inputs."""
    return round(SLACK * max(_gradients(work, savings), _sampling(work, savings))) + LIBRARIES


def layer_hessians(work: Work) -> int:
    """What the Hessians of a layer's inputs take, experts sharing theirs."""
    found: dict[tuple[int, str], int] = {}
    for (role, i), (_, width) in work.shapes.items():
        kind = "down" if role.endswith(".down") else "o" if role.endswith(".o") else role.split(".")[0]
        found[i, kind] = max(found.get((i, kind), 0), width**2 * _FLOAT)
    totals = [0] * work.config.layers
    for (i, _), size in found.items():
        totals[i] += size
    return max(totals)


def layer_samples(work: Work) -> int:
    """What the inputs and gradients of the sampled tokens of a layer take, all experts asked as if one."""
    found = [0] * work.config.layers
    for (role, i), shape in work.shapes.items():
        if not _EXPERT.search(role) or ".experts.0." in role:
            found[i] += sum(shape) * MOST_SAMPLES * _FLOAT
    return max(found)


def _layers(work: Work, savings: Savings) -> float:
    """The weights of a layer: as stored, and quantized in float32; those of one input lie together."""
    if savings.streamed:
        return 3 * SCRATCH_BYTES
    held = work.layer * work.weight_bytes
    if not work.calibration.shift:
        return held + work.layer * _FLOAT + SCRATCH_BYTES
    return held + (work.layer + work.stacked) * _FLOAT + SCRATCH_BYTES


def _tokens(work: Work, most: int, *, token_wise: bool) -> int:
    """The tokens of a batch, where at most so many are asked for."""
    if token_wise and most < work.window:
        return most
    return max(1, most // work.window) * work.window


def _batch(work: Work, savings: Savings, *, attention: bool) -> float:
    """A layer and the activations of a batch in it."""
    return _layers(work, savings) + activations(work, savings, attention=attention)


def activations(work: Work, savings: Savings, *, attention: bool) -> float:
    """What a batch takes in the attention of a layer, or in its MLP."""
    c = work.config
    tokens = _tokens(work, savings.batch_tokens, token_wise=not (attention or c.graph.parallel))
    heads, keys = c.head_widths
    # What it reads, normalised, and gives; queries, rotated and laid out by heads, what heads give, and that
    # of the original model.
    beside = 2 * (c.stream - c.hidden)
    mixed = 5 * c.hidden + beside + 6 * heads + 4 * keys
    # Gate and up, their product, that of the original model, what the product with it is made of.
    fed = 4.5 * work.inner + 8 * c.hidden + beside
    wide = max(mixed, fed) if c.graph.parallel else mixed if attention else fed
    return tokens * wide * _FLOAT + (_scores(work) if attention else 0)


def _scores(work: Work) -> float:
    """The scores of one sequence, where attention writes them out, or a mask."""
    c, window = work.config, work.window
    if c.score_cap is not None or c.has("attn.sinks", 0):
        return 4 * c.heads * window**2 * _FLOAT
    if any(each is not None and each < window for each in c.windows):
        return 2 * window**2 * _FLOAT
    return 0


def _held(work: Work, width: int) -> float:
    """The rows held out of a Hessian: x, and x~ where that is another."""
    held = min(MOST_HELD, max(1, work.windows // HELD_OUT_OF) * work.window)
    pairs = 2 if work.calibration.shift and work.experts(width) == 1 else 1
    return held * width * pairs * _FLOAT


def _squares(work: Work, form: HessianForm, width: int) -> float:
    """The numbers of a Hessian as it is kept."""
    return float(sum((part.stop - part.start) ** 2 for part in form.blocks(width)))


def _shifts(work: Work, form: HessianForm, width: int) -> bool:
    shifts = work.calibration.shift and form.shift and form.columns is None
    return shifts and work.experts(width) == 1


def _summing(work: Work, savings: Savings, width: int) -> float:
    form = savings.form(width)
    matrices = 2 if _shifts(work, form, width) else 1
    sums = matrices * _squares(work, form, width) * work.experts(width) * _FLOAT
    return sums + _held(work, width) + _batch(work, savings, attention=width != work.inner)


def _factoring(work: Work, savings: Savings, width: int) -> float:
    """The sums, and what their factor and shift are made in."""
    form = savings.form(width)
    squares, shifts = _squares(work, form, width), _shifts(work, form, width)
    few = shifts and work.calibration.tokens_BT.size < AMPLE_TOKENS * width
    # The sums; the factor in float32; a copy of what becomes the shift, where several dampings are tried.
    alive = float(_FLOAT * (2 + shifts + few) * squares)
    alive += 0 if form.single else _DOUBLE * squares
    others = 2 * _FLOAT * squares * (work.experts(width) - 1 + (2 if work.experts(width) > 1 else 0))
    weights = 0 if savings.streamed else work.layer * (work.weight_bytes + _FLOAT)
    # Held rows are brought together before anything is factored.
    sums = _FLOAT * (1 + shifts) * squares + _held(work, width)
    return max(alive, sums) + others + _held(work, width) + weights


def _rounding(work: Work, savings: Savings, width: int) -> float:
    """What the Hessian became, and blocks of rows."""
    form = savings.form(width)
    squares = _squares(work, form, width)
    matrices = 2 + _shifts(work, form, width) + work.eights
    kept = matrices * squares * work.experts(width) * _FLOAT + _held(work, width)
    # Another factor, which as many threads as ask for one make in float64.
    made = squares * _DOUBLE * min(work.jobs, work.experts(width)) if work.eights and not form.single else 0
    weights = 0 if savings.streamed else work.layer * (work.weight_bytes + _FLOAT)
    return kept + made + weights + rows_bytes(work, savings, width)


def rows_bytes(work: Work, savings: Savings, width: int) -> float:
    """What blocks of rows take while they are rounded, in all threads."""
    asked = savings.rows_bytes
    limit = BLOCK_BYTES if asked is None else min(BLOCK_BYTES, asked // BLOCKS)
    least = work.calibration.output_rows if work.calibration.traits.over_rows else 64
    block = max(limit, least * width * 8)
    outputs = 0.0
    if work.calibration.traits.over_rows:
        size = work.calibration.output_rows
        outputs = block / (8 * width) * size * 4 * _FLOAT + 4 * size * width
    return work.jobs * (_BLOCK_SHARE * block + 128 * width * 3 * _FLOAT + 24 * 64 * MOST_HELD + outputs)


def _gradients(work: Work, savings: Savings) -> float:
    """A layer's activations, all of which are needed on the way back, and sums of its gradients' products."""
    c = work.config
    tokens = _tokens(work, savings.backward_tokens or BACKWARD_TOKENS, token_wise=False)
    heads, keys = c.head_widths
    kept = tokens * (7 * work.inner + 8 * c.hidden + 4 * c.stream + 10 * heads + 8 * keys) * _FLOAT
    size = work.calibration.output_rows
    blocks: dict[int, int] = {}
    for (_, i), (rows, _) in work.shapes.items():
        blocks[i] = blocks.get(i, 0) + rows * min(rows, size)
    weights = 3 * SCRATCH_BYTES if savings.streamed else work.layer * work.weight_bytes + 2 * SCRATCH_BYTES
    sums = 3 * max(blocks.values()) * _FLOAT
    return kept + _scores(work) * 2 + sums + weights + _tables(work, savings)


def _tables(work: Work, savings: Savings) -> float:
    c = work.config
    if savings.streamed:
        return SCRATCH_BYTES
    return c.vocab * c.hidden * work.weight_bytes * (1 if c.tied else 2)


def _sampling(work: Work, savings: Savings) -> float:
    """Blocks of logits, their probabilities in float32, sums of these in float64."""
    tokens = _tokens(work, savings.backward_tokens or BACKWARD_TOKENS, token_wise=False)
    elements = max(BLOCK_ELEMENTS["cpu"], tokens)
    vocab = work.config.vocab * _DOUBLE * 3
    return elements * 48 + tokens * work.config.hidden * 8 * _FLOAT + vocab + _tables(work, savings)


def _disk(work: Work, savings: Savings) -> int:
    calibration, c = work.calibration, work.config
    tokens = max(2, work.windows) * work.window
    # Both streams between steps, and what the last linear of a step reads.
    disk = tokens * (2 * c.stream + max(work.widths) if calibration.shift else c.stream) * _FLOAT
    disk += work.layer * _FLOAT if savings.streamed else 0
    disk += c.vocab * c.hidden * _FLOAT if work.writes_table else 0
    if not calibration.traits.over_rows:
        return disk
    # The backward pass keeps what every layer reads, then E[g g^T] in blocks of rows.
    read = int(calibration.gradient_windows_WT.size) * c.stream * (c.layers + 1) * _FLOAT
    size = calibration.output_rows
    blocks = sum(-(-rows // min(rows, size)) * min(rows, size) ** 2 for rows, _ in work.shapes.values())
    return max(disk, read) + blocks * _FLOAT
