"""Verifies an output: against its own manifest, and against the source that it was made from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from qconvert.check.audit import audit, errors_in, reordered_in, scaling_in
from qconvert.check.compare import TensorDifference, compare_checkpoints, locate
from qconvert.check.scaled import factors_between, mismatch
from qconvert.checkpoint.open import Checkpoint, require_weights
from qconvert.core.dtypes import Json
from qconvert.core.factors import Factors
from qconvert.errors import shown
from qconvert.plan.loader_notices import notice_lines, notices
from qconvert.plan.scales import factors_by_tensor


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found: `findings` to show, `problems` (sentences that each name a file or a tensor), and
    `warnings` about loaders. An output without problems is what it promises to be, if its bytes were
    `compared` with recorded hashes or its numbers with a source; if not, only its structure is known.
    """

    findings: Json
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    compared: bool

    @property
    def verdict(self) -> str:
        """`verified`, `failed`, or `unrecorded`: nothing is recorded to compare with."""
        return "failed" if self.problems else "verified" if self.compared else "unrecorded"


def verify(checkpoint: Checkpoint, against: Checkpoint | None = None) -> Verification:
    """Hold a checkpoint against its manifest, and every tensor against that of its source.

    Raises CorruptCheckpoint for tensors that contradict config.json, QConvertError for a model without any.
    """
    require_weights(checkpoint, shown(str(checkpoint.path)))
    architecture = checkpoint.architecture
    checkpoint.bind(allow_unknown=True)
    findings, problems, recorded = audit(checkpoint)
    if against is not None:
        factors, told, wrong = _scaling(checkpoint, against)
        differences = list(compare_checkpoints(against, checkpoint, reordered_in(checkpoint), factors))
        findings = {**findings, **told, "compared": summary_of(differences)}
        errors = errors_in(checkpoint) if factors else {}
        problems += wrong + [_complaint(d) for d in differences if not _acceptable(d, errors.get(d.name))]
    warnings = notice_lines(notices(checkpoint.tensors, architecture, tied=architecture.tied))
    return Verification(findings, tuple(problems), tuple(warnings), recorded or against is not None)


def _scaling(checkpoint: Checkpoint, against: Checkpoint) -> tuple[Mapping[str, Factors], Json, list[str]]:
    """What the source's tensors have to be scaled by, what is told of it, and what contradicts the record."""
    recorded = {name: each["factors"] for name, each in scaling_in(checkpoint)["sources"].items()}
    if not recorded:
        return {}, {}, []
    rows = {name: (locate(against, name), locate(checkpoint, name)) for name in recorded}
    lacking = [name for name, (of_a, of_b) in rows.items() if not of_a or not of_b]
    if lacking:
        return {}, {}, [f"{lacking[0]}: its record says that it is scaled, and it is not in both models"]
    found = factors_between(against, checkpoint, recorded, rows)
    wrong = [sentence for each in found if (sentence := mismatch(each, recorded))]
    told = f"{len(found)} inputs have scaled channels; the source's weights are scaled alike to be compared"
    return factors_by_tensor(against.tensors.values(), against.architecture, found), {"scaled": told}, wrong


def summary_of(differences: Iterable[TensorDifference]) -> dict[str, int]:
    """How many tensors are equal, differ, and so on."""
    return dict(Counter(d.status for d in differences))


def _acceptable(d: TensorDifference, recorded: float | None = None) -> bool:
    """Whether a tensor of the source may differ from the output's in this way: rounded to another type, or
    as quantizing changes numbers.

    A quantized number may lie half a step away, and further only where the search clipped its
    group's range; the bound on the relative error catches a wrong scale or a shifted row. Numbers that were
    scaled alike lie apart by what is `recorded` of the run, and by what their factors are not known to.
    """
    if d.status == "equal":
        return True
    if d.scaled and d.status == "differs" and (recorded is not None or not d.quantized):
        return d.rounded or d.relative_rms < _SCALED_RMS + (recorded or 0.0)
    worst = _WORST_OF_THREE_VALUES if d.encoding in ("tq1_0", "tq2_0") else _WORST_RELATIVE_RMS
    return d.status == "differs" and (d.rounded or (d.quantized and d.relative_rms < worst))


# int2 with a searched scale loses at most this share of a weight's energy on any distribution seen.
_WORST_RELATIVE_RMS = 0.6
# What factors that were found in rows of codes add to a relative error.
_SCALED_RMS = 0.03
# -1, 0 and 1 times the largest magnitude of 256 weights that were not made for that: most become 0.
_WORST_OF_THREE_VALUES = 0.95


def _complaint(d: TensorDifference) -> str:
    if d.difference is None:
        return f"{d.name}: {d.status} {d.note}".rstrip()
    return f"{d.name}: differs from the source (relative RMS {d.relative_rms:.4g})"
