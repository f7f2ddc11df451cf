"""Defines recipes: how weights are to be stored, as one typed value that YAML and flags both produce.

A recipe names roles, never the tensors of one model; `qconvert.plan.selectors` applies it to one. Unknown
keys are errors: a misspelt key must not be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import TYPE_CHECKING, Any, get_args

from qconvert.core.config_json import MAX_DIMENSION
from qconvert.core.schemes import KEEP, Scheme, check_scheme, parse_scheme
from qconvert.errors import BadRecipe, shown
from qconvert.formats.layouts import registry
from qconvert.plan.matching import check_selector

if TYPE_CHECKING:  # what few recipes have: their help shall not wait for it
    from qconvert.models.declared import Declaration
    from qconvert.models.parameters import ParameterTemplate

# What can be stacked, by the names users give it: the roles of the fused tensors.
FUSIONS: Mapping[str, tuple[str, ...]] = {
    "qkv": ("attn.qkv",),
    "gate_up": ("mlp.gate_up",),
    "experts": ("mlp.experts.gate_up", "mlp.experts.down"),
}
# What `fuse` stacks when nothing is said: linears that one input feeds.
SAME_INPUT = ("qkv", "gate_up")
MOST_RANKS = 1024
# A file's values as they may stand in a message: YAML aliases can stand for 9**20 items in a few lines.
_BRIEF = Repr()
_BRIEF.maxlevel = 2


@dataclass(frozen=True, slots=True)
class Rule:
    """Weights that `plan.matching` finds get `scheme` (None: keep them as they are)."""

    select: str
    scheme: Scheme | None

    def __post_init__(self) -> None:
        """Refuse a selector that no model could make right."""
        check_selector(self.select)
        check_scheme(self.scheme)

    @property
    def label(self) -> str:
        return self.scheme.label if self.scheme else KEEP


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides an output beside the input itself.

    `scheme` is for the linears (None: keep them); `rules` override it, the last match winning.
    `fuse` holds fusion names (`qkv`, `gate_up`, `experts`); `tie` is True to drop a head equal to the
    embedding, False to write it out, None to leave it. `search` chooses the scale search over
    plain min-max; `allow_smaller_group` lets a row that the group size does not divide take the
    largest of 128, 64 and 32 that does; `pad_to_tp` is a number of tensor-parallel ranks, on each of which
    the MLPs' inner features shall fill whole groups; `architecture` declares a model that the
    catalogue lacks.
    """

    scheme: Scheme | None = None
    rules: tuple[Rule, ...] = ()
    fuse: tuple[str, ...] = ()
    tie: bool | None = None
    layout: str = registry.DEFAULT
    search: bool = True
    allow_smaller_group: bool = False
    pad_to_tp: int | None = None
    architecture: Declaration | None = None

    def __post_init__(self) -> None:
        """Refuse names and schemes that no model could make right."""
        check_scheme(self.scheme)
        registry.check_written(self.layout)
        for name in self.fuse:
            _choice(name, tuple(FUSIONS), "fuse")

    def to_json(self) -> dict[str, Any]:
        """The recipe as plain data, in the spelling that `parse_recipe` reads."""
        return {
            "scheme": self.scheme.label if self.scheme else KEEP,
            "rules": [{"select": rule.select, "scheme": rule.label} for rule in self.rules],
            "fuse": list(self.fuse),
            "tie": self.tie,
            "layout": self.layout,
            "search": self.search,
            "allow_smaller_group": self.allow_smaller_group,
            **({"pad_to_tp": self.pad_to_tp} if self.pad_to_tp is not None else {}),
            **({"architecture": self.architecture.to_json()} if self.architecture else {}),
        }

    def with_(self, **changes: Any) -> Recipe:
        """This recipe with some fields replaced."""
        return replace(self, **changes)


def load_recipe(path: Path) -> Recipe:
    """Read a recipe from a YAML file. Raises BadRecipe naming the file and the key."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRecipe(f"{path}: cannot be read ({error})", "give the path of a YAML file") from error
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
    ) as error:  # ValueError: numbers and dates that are none
        why = shown(str(error).splitlines()[0])
        raise BadRecipe(f"{path}: not YAML ({why})", "see `qconvert quantize --help`") from error
    return parse_recipe(data, str(path))


def parse_recipe(data: object, origin: str) -> Recipe:
    """Read a recipe from plain data; unknown keys are errors that name the nearest known one."""
    record = _record(data, origin, {f.name for f in fields(Recipe)} | {"keep"})
    rules = [_rule(entry, f"{origin}: rules[{i}]") for i, entry in enumerate(_items(record, "rules", origin))]
    rules += [Rule(_text(entry, f"{origin}: keep"), None) for entry in _items(record, "keep", origin)]
    return Recipe(
        scheme=parse_scheme(_text(record.get("scheme", KEEP), f"{origin}: scheme")),
        rules=tuple(rules),
        fuse=tuple(
            _choice(name, tuple(FUSIONS), f"{origin}: fuse") for name in _items(record, "fuse", origin)
        ),
        tie=_flag(record, "tie", origin),
        layout=_choice(record.get("layout", registry.DEFAULT), registry.written(), f"{origin}: layout"),
        search=_flag(record, "search", origin) is not False,
        allow_smaller_group=_flag(record, "allow_smaller_group", origin) is True,
        pad_to_tp=_ranks(record, origin),
        architecture=_declaration(record.get("architecture"), f"{origin}: architecture"),
    )


def _declaration(data: object, origin: str) -> Declaration | None:
    """Read the section that declares a model which the catalogue lacks."""
    from qconvert.models.declared import Declaration

    if data is None:
        return None
    record = _record(data, origin, ("like", "rename", "keys", "without", "slots"))
    if "like" not in record:
        raise BadRecipe(f"{origin}: like is missing", "write like: and the model_type it resembles")
    slots = enumerate(_items(record, "slots", origin))
    return Declaration(
        like=_text(record["like"], f"{origin}: like"),
        rename=_pairs(record, "rename", origin),
        keys=_pairs(record, "keys", origin),
        without=tuple(_text(role, f"{origin}: without") for role in _items(record, "without", origin)),
        slots=tuple(_slot(entry, f"{origin}: slots[{i}]") for i, entry in slots),
    )


def _slot(entry: object, where: str) -> ParameterTemplate:
    from qconvert.models.parameters import ParameterKind, ParameterTemplate

    record = _record(entry, where, ("role", "module", "shape", "kind", "bias"))
    missing = {"role", "module", "shape"} - set(record)
    if missing:
        raise BadRecipe(
            f"{where}: {sorted(missing)[0]} is missing",
            "a slot is {role: attn.q_norm, module: layers.{layer}.q_norm, shape: [head_dim], kind: norm}",
        )
    module = _text(record["module"], f"{where}: module")
    if set(re.findall(r"\{.*?\}|[{}]", module)) - {"{layer}"}:
        raise BadRecipe(
            f"{where}: module {module!r} has braces",
            "write {layer} for the number of the layer, and no other braces",
        )
    return ParameterTemplate(
        role=_text(record["role"], f"{where}: role"),
        module=module,
        shape=tuple(
            _text(str(d) if isinstance(d, int) and 0 < d <= MAX_DIMENSION else d, f"{where}: shape")
            for d in _items(record, "shape", where)
        ),
        kind=_choice(record.get("kind", "linear"), get_args(ParameterKind), f"{where}: kind"),  # type: ignore[arg-type]
        bias=_flag(record, "bias", where) is True,
    )


def _pairs(record: Mapping[str, Any], key: str, origin: str) -> tuple[tuple[str, str], ...]:
    value = record.get(key) or {}
    if not isinstance(value, dict):
        raise BadRecipe(f"{origin}: {key} is not a mapping", f"write {key}: {{ours: theirs}}")
    return tuple((_text(k, f"{origin}: {key}"), _text(v, f"{origin}: {key}")) for k, v in value.items())


def _record(data: object, origin: str, known: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise BadRecipe(
            f"{origin}: not a mapping of keys to values", f"known keys: {', '.join(sorted(known))}"
        )
    for key in data:
        if key not in set(known):
            near = get_close_matches(str(key), list(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
            raise BadRecipe(f"{origin}: unknown key {_BRIEF.repr(key)}", hint)
    return data


def _items(record: Mapping[str, Any], key: str, origin: str) -> Sequence[Any]:
    value = record.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRecipe(f"{origin}: {key} is not a list", f"write {key}: [...]")
    return value


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise BadRecipe(f"{where}: {_BRIEF.repr(value)} is not text", "put it in quotes")
    return value


def _flag(record: Mapping[str, Any], key: str, origin: str) -> bool | None:
    value = record.get(key)
    if value is not None and not isinstance(value, bool):
        raise BadRecipe(f"{origin}: {key} is {_BRIEF.repr(value)}", "write true, false, or leave it out")
    return value


def _ranks(record: Mapping[str, Any], origin: str) -> int | None:
    value = record.get("pad_to_tp")
    if value is not None and (type(value) is not int or not 1 <= value <= MOST_RANKS):
        raise BadRecipe(f"{origin}: pad_to_tp is {_BRIEF.repr(value)}", f"write a number, 1 to {MOST_RANKS}")
    return value


def _choice(value: object, known: Sequence[str], where: str) -> str:
    if value not in known:
        raise BadRecipe(f"{where}: {_BRIEF.repr(value)} is not known", f"one of: {', '.join(known)}")
    return str(value)


def _rule(entry: object, where: str) -> Rule:
    record = _record(entry, where, ("select", "scheme"))
    missing = {"select", "scheme"} - set(record)
    if missing:
        raise BadRecipe(
            f"{where}: {sorted(missing)[0]} is missing", "a rule is {select: SELECTOR, scheme: SCHEME}"
        )
    return Rule(_text(record["select"], where), parse_scheme(_text(record["scheme"], where)))


def parse_rule(text: str) -> Rule:
    """Read `SELECTOR=SCHEME` as given to --rule."""
    select, equals, scheme = text.rpartition("=")
    if not equals or not select:
        raise BadRecipe(
            f"rule {text!r}: no '='", "write --rule SELECTOR=SCHEME, for example --rule mlp.down=int8"
        )
    return Rule(select, parse_scheme(scheme))
