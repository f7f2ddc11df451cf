"""Checks sizes: what tensor parallelism cuts, and what kernels want of the pieces.

Sources: vLLM 0.33 (`layers/linear.py`, `quantization/utils/marlin_utils.py`:
check_marlin_supports_shape and its constants; `utils/fp8_utils.py`: validate_fp8_block_shape), read in
source; Qwen's answer for its 72B files, QwenLM/Qwen3#578.
"""

from __future__ import annotations

from collections.abc import Iterator

from qconvert.check.subject import ERROR, FUSING, WARNING, Problem, Subject
from qconvert.core.encodings import AffineInt, Codebook, ModelTensor
from qconvert.core.tensor_parallel import INPUT_SPLIT, whole_unit
from qconvert.models import Parameter

_MARLIN_COLUMNS, _MARLIN_ROWS, _MARLIN_GROUPS = 128, 64, (None, 32, 64, 128)
_KV = ("attn.k", "attn.v")


def _parallel(s: Subject) -> Iterator[Problem]:
    """Whole groups, blocks and words on every rank."""
    if s.tp == 1 or s.loader not in FUSING:
        return
    for parameter, tensor, size in _split_sizes(s):
        split = "columns" if parameter.group in INPUT_SPLIT else "rows"
        pads = parameter.role.startswith("mlp.") and parameter.role != "mlp.router"
        widen = f"; `qconvert convert --pad-to-tp {s.tp}` grows it by zeros" if pads else ""
        if size % s.tp and parameter.kind == "linear" and parameter.role != "lm_head":
            fact = f"{size} {split} do not divide among {s.tp} ranks"
            yield Problem(ERROR, tensor.name, fact, f"--tp {_less(size, s.tp)}{widen}")
            continue
        unit = whole_unit(tensor.encoding, split, s.traits)
        if unit > 1 and size // s.tp % unit:
            fact = f"{size} {split} on {s.tp} ranks are {size // s.tp} each, not a multiple of {unit}"
            yield Problem(ERROR, tensor.name, fact, f"use fewer ranks or a smaller group size{widen}")


def _split_sizes(s: Subject) -> Iterator[tuple[Parameter, ModelTensor, int]]:
    """What is divided among the ranks: columns, or rows, of a fused linear those of each part.

    Heads of keys and values fewer than ranks are repeated instead.
    """
    head_dim, kv_heads = _head_sizes(s)
    for parameter, tensor in s.weights:
        entry = s.architecture.fused.get(tensor.name)
        parts = entry.members if entry is not None and not entry.fusion.per_expert else (parameter,)
        for part in parts:
            size = tensor.width if parameter.group in INPUT_SPLIT else part.shape[-2]
            repeated = part.role in _KV and kv_heads < s.tp and s.tp % max(1, kv_heads) == 0
            yield part, tensor, head_dim * s.tp if repeated and head_dim else size


def _head_sizes(s: Subject) -> tuple[int, int]:
    """The rows of one head, and the number of heads of keys; zeros where the config has no such keys."""
    heads = s.architecture.settings.get("num_attention_heads")
    kv_heads = s.architecture.settings.get("num_key_value_heads") or heads
    k = next(
        (p for p in s.architecture.parameters.values() if p.role == "attn.k" and p.param == "weight"), None
    )
    if k is None or not isinstance(kv_heads, int) or kv_heads < 1:
        return 0, 0
    return k.shape[0] // kv_heads, kv_heads


def _heads(s: Subject) -> Iterator[Problem]:
    """Heads are never cut."""
    heads = s.architecture.settings.get("num_attention_heads")
    if s.tp == 1 or s.loader not in FUSING or not isinstance(heads, int):
        return
    if heads % s.tp:
        fact = f"{heads} heads do not divide among {s.tp} ranks"
        yield Problem(ERROR, "config.json", fact, f"--tp {_less(heads, s.tp)}")
    _, kv_heads = _head_sizes(s)
    if kv_heads and kv_heads % s.tp and s.tp % kv_heads:
        fact = f"{kv_heads} heads of keys neither divide among {s.tp} ranks nor can be repeated on them"
        yield Problem(ERROR, "config.json", fact, f"--tp {_less(kv_heads, s.tp)}")


def _blocks_of_parts(s: Subject) -> Iterator[Problem]:
    """FP8 blocks of linears that are stacked must not hold rows of two of them."""
    if s.loader not in FUSING:
        return
    for entry in s.architecture.fused.values():
        if entry.fusion.per_expert:
            continue
        for part in entry.members:
            tensor = s.tensors.get(part.name) or s.tensors.get(entry.whole.name)
            encoding = tensor.encoding if tensor is not None else None
            rows = encoding.group_rows if isinstance(encoding, Codebook) else None
            if rows and part.shape[0] % rows:
                fact = f"its {part.shape[0]} rows, stacked with others, do not divide into blocks of {rows}"
                yield Problem(ERROR, part.name, fact, "another scheme, for example fp8-channel")


def _marlin(s: Subject) -> Iterator[Problem]:
    """The fast kernels for 4 and 8 bits want sizes of their own."""
    if s.loader not in FUSING or not s.traits.marlin:
        return
    for parameter, tensor, encoding in s.quantized:
        if not isinstance(encoding, AffineInt) or parameter.kind != "linear" or encoding.bits not in (4, 8):
            continue
        if encoding.group_size not in _MARLIN_GROUPS:
            fact = (
                f"groups of {encoding.group_size} columns have no Marlin kernel (32, 64, 128 or whole rows)"
            )
            yield Problem(WARNING, tensor.name, fact, "expect a slower kernel, or none")
        by_columns = parameter.group in INPUT_SPLIT
        columns = tensor.width // (s.tp if by_columns else 1)
        rows = tensor.shape[-2] // (1 if by_columns else s.tp)
        for size, unit, what in ((columns, _MARLIN_COLUMNS, "columns"), (rows, _MARLIN_ROWS, "rows")):
            # Where a loader stacks this weight with others, its own rows say little.
            wholes = s.architecture.wholes.get(tensor.name, ()) if what == "rows" else ()
            if size % unit and all(entry.fusion.per_expert for entry, _ in wholes):
                fact = f"{size} {what} on a rank: Marlin kernels want a multiple of {unit}"
                yield Problem(WARNING, tensor.name, fact, "expect a slower kernel, or none")


def _less(size: int, tp: int) -> int:
    return max(n for n in range(1, tp + 1) if size % n == 0)


SHAPE_RULES = (_parallel, _heads, _blocks_of_parts, _marlin)
