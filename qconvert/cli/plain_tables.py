"""Notes the share of an output that an unquantized embedding and head take, and what makes them smaller.

Which loader takes them quantized: docs/reference/clients.md, and `plan.loader_notices`.
"""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.convert.job import Job
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, GgmlBlocks, ModelTensor, Quantized, Unquantized
from qconvert.core.layout_traits import LayoutTraits
from qconvert.formats.layouts import registry
from qconvert.models.parameter_table import form_bytes
from qconvert.report.tables import size

_WORTH_SAYING = 0.2  # of the bytes
_NAMES = {"embed": "embedding", "lm_head": "head"}
_LOADED_BY = {"embed": "vLLM loads it, transformers does not", "lm_head": "vLLM and transformers load it"}


def plain_tables(job: Job) -> str | None:
    """One line, where a scheme leaves tables plain that are a good part of the bytes."""
    compiled = job.compiled
    recipe, architecture, traits = compiled.request.recipe, compiled.architecture, compiled.layout.traits
    if recipe.scheme is None or compiled.is_gguf:
        return None
    outputs = compiled.outputs
    places = {role: architecture.table(role) for role in _NAMES}
    stored = {role: outputs[p.name] for role, p in places.items() if p is not None and p.name in outputs}
    plain = {role: each for role, each in stored.items() if isinstance(each.encoding, Unquantized)}
    kept = sum(form_bytes(each.encoding, each.shape) for each in plain.values())
    total = sum(form_bytes(each.encoding, each.shape, traits) for each in outputs.values())
    if not plain or kept < _WORTH_SAYING * total:
        return None
    tied = "lm_head" not in stored and architecture.tied
    named = "embedding, also the head," if tied else " and ".join(map(_NAMES.__getitem__, plain))
    verb = "stays" if len(plain) == 1 else "stay"
    share = f"note: the {named} {verb} {_labels(plain)}: {100 * kept // total} % of the bytes"
    return f"{share}; {_saving(plain, traits, tied=tied)}"


def decoded_tables(job: Job) -> str | None:
    """One line, where tables of a GGUF file have become plain numbers, with the bytes before and now."""
    compiled = job.compiled
    if compiled.request.layout_target is None:
        return None
    roles = {p.name: role for role in _NAMES if (p := compiled.architecture.table(role)) is not None}
    found, before, now = list[str](), 0, 0
    for unit in compiled.plan.units:
        role, source, made = roles.get(unit.output.name), unit.inputs[0].tensor, unit.output
        if role and isinstance(source.encoding, GgmlBlocks) and isinstance(made.encoding, Unquantized):
            found.append(
                f"the {_NAMES[role]} is {source.encoding.type} in the file and {made.encoding.label} here"
            )
            before += form_bytes(source.encoding, source.shape)
            now += form_bytes(made.encoding, made.shape)
    if not found:
        return None
    return f"note: {', '.join(found)}, which takes {size(now)} in place of {size(before)}"


def _labels(plain: Mapping[str, ModelTensor]) -> str:
    return " and ".join(dict.fromkeys(each.encoding.label for each in plain.values()))


def _saving(plain: Mapping[str, ModelTensor], traits: LayoutTraits, *, tied: bool) -> str:
    default = traits.name == registry.DEFAULT
    if default and tied:
        less = size(_saved(plain["embed"], registry.traits_of("mlx")))
        return (
            "vLLM and transformers cannot load it quantized (to-gguf quantizes it; "
            f"--layout mlx --rule embed=int8 saves {less})"
        )
    saved = {role: size(_saved(each, traits)) for role, each in plain.items()}
    takes_head = not any(limit.about == "head" for limit in traits.limits)
    takes = {"embed": traits.embeddings != "plain", "lm_head": takes_head}
    rules = [
        f"--rule {role}=int8 saves {saved[role]}{f' ({_LOADED_BY[role]})' if default else ''}"
        for role in ("lm_head", "embed")
        if role in plain and takes[role]
    ]
    return (
        ", ".join(rules)
        or f"loaders of {traits.name} load such tables unquantized only; `to-gguf` quantizes them"
    )


def _saved(tensor: ModelTensor, traits: LayoutTraits) -> int:
    """The bytes that a table has less in 8 bits, in groups of 128 columns where these divide its rows."""
    group = next((columns for columns in (128, 64, 32) if tensor.width % columns == 0), None)
    coded: Quantized = AffineInt(8, group, True, DType.BF16)
    if traits.name == "mlx" and group is not None:
        coded = AffineMin(8, group, DType.BF16)
    return form_bytes(tensor.encoding, tensor.shape) - form_bytes(coded, tensor.shape, traits)
