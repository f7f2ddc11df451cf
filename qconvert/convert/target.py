"""Turns a target, a size or a divergence, into an ordinary request: rules of a recipe, or tensor types.

Every encoding to choose among is planned for the whole model; what each weight would take and cost in each of
these plans is put to `plan.budget`, and its answer written as rules. So planning itself stays as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Protocol

import numpy as np

from qconvert.calibrate.sensitivity import Sensitivity, TextStatistics
from qconvert.convert.job import Job
from qconvert.convert.prices import priced_groups, sized_groups
from qconvert.convert.saved_prices import SavedPrices
from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import GGMLType, parse_ggml_type
from qconvert.core.schemes import parse_scheme
from qconvert.errors import BadRecipe
from qconvert.models.parameter_table import table_of_outputs
from qconvert.plan.budget import (
    Group,
    Mix,
    SizeTarget,
    Target,
    fewest_bytes,
    selectors,
    smallest_cost,
    uniform,
)
from qconvert.plan.gguf.file_types import FILE_TYPES
from qconvert.plan.recipe import Rule
from qconvert.plan.request import GGUFTarget, Request
from qconvert.report.tables import size as written_size

Prepare = Callable[[Request], Job]
"""Compiles a request for the model at hand (`execute.prepare`)."""
Measure = Callable[[Sequence[Job]], Sequence[np.ndarray]]
"""What jobs cost in nats, of every token, measured with nearest codes (`evaluate.planned_divergences`)."""
# Mixes that are measured for a divergence at most, and the share of it from which one is taken at once.
_MOST_TRIES, _NEAR = 5, 0.95
# By so many bytes at most the headers of two outputs of one encoding differ.
_HEADERS = 1 << 16


@dataclass(frozen=True, slots=True)
class Candidate:
    """A mix, the request that makes it, and the bytes of its output: of its files where the target is in
    bytes, else of its tensors.
    """

    mix: Mix
    request: Request
    nbytes: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """What a target became, and why.

    `best` is what is asked for: the mix of the least expected cost, until it is `decided` otherwise. `rival`
    is the best of one encoding, where that is another one, and reaches the same size. `weights` are the
    numbers that the output holds; `uniform` the best of the mixes of one encoding that reach the target, None
    where none does. `measured` are the nats of the mix and, of a size, of the rival; empty where nothing was
    measured. `left_out` are types that some weight cannot have, and why.
    """

    best: Candidate
    groups: tuple[Group, ...]
    weights: int
    uniform: Mix | None
    rival: Candidate | None = None
    measured: tuple[float, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def decided(self, measured: tuple[float, ...], *, mixed: bool) -> Chosen:
        """The same with what was measured of the mix and of its rival, and the better one of the two."""
        assert self.rival is not None
        return replace(self, best=self.best if mixed else self.rival, measured=measured)

    @property
    def request(self) -> Request:
        return self.best.request

    @property
    def mix(self) -> Mix:
        return self.best.mix

    @property
    def nbytes(self) -> int:
        return self.best.nbytes

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights


def choose(
    target: Target,
    request: Request,
    found: Iterable[Sensitivity],
    prepared: Prepare,
    *,
    record: Json | None = None,
    damping: float | None = None,
    measure: Measure | None = None,
    saved: SavedPrices | None = None,
    written: Prepare | None = None,
    tied: bool = False,
) -> Chosen:
    """The request that reaches a target: the least cost of a size, or the least size of a cost.

    `found` are the sensitivities of the model; `prepared` compiles requests for it, and `written` as they are
    written in the end, with what is calibrated then. Where the request has no statistics, encoders weigh
    errors by those of the text that the sensitivities are of, which `record` describes; with a `damping`,
    they are priced with error feedback, for which the sensitivities must hold rows out, and so is a `tied`
    embedding, as the head that it is. Costs of weights are added up, and those of their errors do not quite
    add up: so a mix for a size has a rival, which is to be measured beside it, and with a `measure`, one for
    a divergence is chosen again where it diverges more or less than was expected. Prices that `saved` has are
    taken from there, where the request has no statistics. Raises BadRecipe for a target that no mix reaches.
    """
    written, request = written or prepared, _naming_the_head(request, tied=tied)
    price: Callable[[Mapping[str, Job], Iterable[Sensitivity]], list[Group]] = priced_groups
    if request.statistics is None:
        measured = TextStatistics(record or {}, damping, tied and damping is not None)
        request, found = replace(request, statistics=measured), measured.keeping(found)
        price = priced_groups if saved is None else partial(saved.groups, statistics=measured)
    jobs, left_out = _jobs(request, target, prepared)
    first, groups = next(iter(jobs.values())), sized_groups(jobs)
    if not groups:
        raise BadRecipe("target: nothing to choose, no weight would be quantized", "leave out some --keep")
    weights = table_of_outputs(first.compiled.outputs, first.compiled.architecture).parameters
    if target.size is None:
        assert target.divergence is not None
        groups = price(jobs, found)
        mix, kls = _diverging(groups, target, request, jobs, prepared, measure if damping is None else None)
        made = _recorded(_request_of(request, mix, jobs), target, mix, record)
        nbytes, same_kl = _tensor_bytes(prepared(made)), _smallest_alone(groups, target.divergence)
        best = Candidate(mix, made, nbytes)
        return Chosen(best, tuple(groups), weights, same_kl, measured=kls, left_out=left_out)
    size = _file_bytes if target.size.nbytes is not None else _tensor_bytes
    most = target.size.most_bytes(weights)
    room = most - size(written(first.compiled.request)) + sum(group.options[0].nbytes for group in groups)
    _require_room(target.size, groups, room, most, weights)
    groups = price(jobs, found)

    def make(mix: Mix, *, recorded: bool = True) -> Candidate:
        made = _request_of(request, mix, jobs)
        made = _recorded(made, target, mix, record) if recorded else made
        return Candidate(mix, made, size(written(made)))

    same = _alone(groups, room, most, make)
    try:
        mixed = _mixed(groups, room, most, make)
    except BadRecipe:  # the record of a mix has no room
        if same is None:
            raise
        mixed = same
    rival = None if same is None or same.mix.labels == mixed.mix.labels else same
    alone = None if same is None else same.mix
    return Chosen(mixed, tuple(groups), weights, alone, rival, left_out=left_out)


def _require_room(size: SizeTarget, groups: Sequence[Group], room: int, most: int, weights: int) -> None:
    """Raise BadRecipe where the least bytes of all groups are more than their `room` in `most` bytes."""
    least = sum(min(option.nbytes for option in group.options) for group in groups)
    if least <= room:
        return
    smallest = most - room + least
    fixed = "what no rule quantizes" + (", headers and metadata" if size.nbytes is not None else "")
    bits = f" ({8 * smallest / weights:.2f} bpw)" if size.nbytes is None else ""
    raise BadRecipe(
        f"target size {size.text}: too small; the smallest is about {written_size(smallest)}{bits}, "
        f"of which {written_size(smallest - least)} are fixed: {fixed}",
        "ask for a larger size, or add an encoding of fewer bits",
    )


class _Make(Protocol):
    def __call__(self, mix: Mix, *, recorded: bool = True) -> Candidate: ...


def _mixed(groups: Sequence[Group], room: int, most: int, make: _Make) -> Candidate:
    """The mix of least cost whose output has at most so many bytes, its record with it."""
    while True:
        made = make(smallest_cost(groups, room))
        if made.nbytes <= most:
            return made
        room -= made.nbytes - most  # headers with the record, and the padding of tensors, differ with the mix


def _alone(groups: Sequence[Group], room: int, most: int, make: _Make) -> Candidate | None:
    """The best mix of one encoding whose output has at most so many bytes: without its record, if need be."""
    mixes = [mix for label in _labels(groups) if (mix := uniform(groups, label)) is not None]
    for mix in sorted(mixes, key=lambda mix: mix.cost):
        for recorded in (True, False) if mix.nbytes <= room + _HEADERS else ():
            made = make(mix, recorded=recorded)
            if made.nbytes <= most:
                return made
    return None


def _diverging(
    groups: Sequence[Group],
    target: Target,
    request: Request,
    jobs: Mapping[str, Job],
    prepared: Prepare,
    measure: Measure | None,
) -> tuple[Mix, tuple[float, ...]]:
    """The smallest mix that is expected, and measured if it can be, to diverge so much at most."""
    assert target.divergence is not None
    wanted = most = target.divergence
    mix = fewest_bytes(groups, most)
    if measure is None:
        return mix, ()
    tried: dict[tuple[str, ...], tuple[Mix, float]] = {}
    while len(tried) < _MOST_TRIES:
        labels = tuple(mix.labels.values())
        if labels in tried:
            break
        kl = float(measure([prepared(_request_of(request, mix, jobs))])[0].mean())
        tried[labels] = mix, kl
        most *= wanted / max(kl, wanted / 10)
        if kl > wanted:  # never the same again: a mix that is expected to cost less
            most = min(most, np.nextafter(mix.cost, 0))
        if _NEAR * wanted <= kl <= wanted or most < sum(min(o.cost for o in g.options) for g in groups):
            break
        mix = fewest_bytes(groups, most)
    reach = [each for each in tried.values() if each[1] <= wanted]
    mix, kl = min(reach, key=lambda each: each[0].nbytes) if reach else min(tried.values(), key=itemgetter(1))
    return mix, (kl,)


def _jobs(request: Request, target: Target, prepared: Prepare) -> tuple[dict[str, Job], dict[str, str]]:
    """A job for every encoding to choose among; and GGUF types that some weight cannot have, with the reason.

    Raises BadRecipe where fewer than two are left.
    """
    jobs: dict[str, Job] = {}
    failed: dict[str, BadRecipe] = {}
    for label in target.labels:
        try:
            jobs[label] = prepared(_uniform_request(request, label))
        except BadRecipe as error:
            if not request.is_gguf:
                raise
            failed[label] = error
    if failed and len(jobs) < 2:
        raise next(iter(failed.values()))
    return jobs, {label: error.fact for label, error in failed.items()}


def _recorded(request: Request, target: Target, mix: Mix, text: Json | None) -> Request:
    """The request with a record of the mix: every group's choice, and bytes and price of every option."""
    chosen = {
        "size": None if target.size is None else target.size.text,
        "kl": target.divergence,
        "choices": list(target.labels),
        "texts": (text or {}).get("texts", []),
        "bytes": mix.nbytes,
        "expected_kl": _rounded(mix.cost),
        "groups": [
            {
                "weights": list(group.members),
                "choice": option.label,
                "options": {each.label: [each.nbytes, _rounded(each.cost)] for each in group.options},
            }
            for group, option in mix.chosen
        ],
    }
    return replace(request, chosen=chosen)


def _rounded(nats: float) -> float:
    """A price to four digits: more would be of the text, not of the weights."""
    return float(f"{nats:.4g}")


def _smallest_alone(groups: Sequence[Group], most_cost: float) -> Mix | None:
    """The smallest mix of one encoding that costs at most so much."""
    mixes = [mix for label in _labels(groups) if (mix := uniform(groups, label)) is not None]
    return min((mix for mix in mixes if mix.cost <= most_cost), key=lambda mix: mix.nbytes, default=None)


def _labels(groups: Sequence[Group]) -> list[str]:
    return [option.label for option in groups[0].options]


def _file_bytes(job: Job) -> int:
    return sum(file.size for file in job.container.files(Path("model.gguf")))


def _tensor_bytes(job: Job) -> int:
    layout, units = job.container.layout, job.compiled.plan.units
    return sum(spec.nbytes for unit in units for spec in layout.stored_arrays(unit.output))


def _naming_the_head(request: Request, *, tied: bool) -> Request:
    """The request with the type of the head asked for of a tied embedding, by its name."""
    target = request.target
    if not (tied and isinstance(target, GGUFTarget) and target.output_tensor_type):
        return request
    named = (*target.tensor_types, (r"^token_embd\.weight$", target.output_tensor_type))
    return replace(request, target=replace(target, tensor_types=named, output_tensor_type=None))


def _uniform_request(request: Request, label: str) -> Request:
    """The request with one encoding for everything that the target chooses for."""
    if isinstance(request.target, GGUFTarget):
        return replace(request, target=replace(request.target, file_type=_file_type(label), pure=True))
    recipe, target = request.recipe, request.layout_target
    # What is written last wins, so that the user's own rules stay.
    quantized = target is not None and target.traits.embeddings != "plain"
    tables = tuple(Rule(role, parse_scheme(label)) for role in ("embed", "lm_head") if quantized)
    return replace(request, recipe=recipe.with_(scheme=parse_scheme(label), rules=(*tables, *recipe.rules)))


def _request_of(request: Request, mix: Mix, jobs: Mapping[str, Job]) -> Request:
    """The request that gives every weight the label which a mix has for it."""
    labels = mix.labels
    most = Counter(labels.values()).most_common(1)[0][0]
    if isinstance(request.target, GGUFTarget):
        types = (*request.target.tensor_types, *_tensor_types(labels))
        target = replace(request.target, file_type=_file_type(most), pure=True, tensor_types=types)
        return replace(request, target=target)
    made = _uniform_request(request, most)
    own = selectors(labels, jobs[most].compiled.architecture)
    rules = tuple(Rule(select, parse_scheme(label)) for select, label in own if label != most)
    before = made.recipe.rules[: len(made.recipe.rules) - len(request.recipe.rules)]
    return replace(made, recipe=made.recipe.with_(rules=(*before, *rules, *request.recipe.rules)))


def _file_type(label: str) -> str:
    """The name of a file type whose base is a type: the first of them, which mixes the least."""
    kind = parse_ggml_type(label)
    found = next((each.name for each in FILE_TYPES.values() if each.base is kind), None)
    if found is None:
        raise BadRecipe(f"type {label}: no file type is named after it", "`qconvert to-gguf --type list`")
    return found


def _tensor_types(labels: Mapping[str, str]) -> Iterator[tuple[str, GGMLType]]:
    """Patterns of GGUF names and their types, the layers of one kind of tensor together."""
    layers: dict[tuple[str, str], list[int]] = {}
    for name, label in labels.items():
        match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
        if match is None:
            yield f"^{re.escape(name)}$", parse_ggml_type(label)
        else:
            layers.setdefault((match[2], label), []).append(int(match[1]))
    for (kind, label), numbers in layers.items():
        listed = "|".join(map(str, sorted(numbers)))
        yield rf"^blk\.({listed})\.{re.escape(kind)}$", parse_ggml_type(label)
