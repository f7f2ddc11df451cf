"""Reads adapters: low-rank changes of a model's weights, which PEFT and mlx-lm save by themselves.

A folder of PEFT's (https://huggingface.co/docs/peft, `save_pretrained`) has adapter_config.json and
adapter_model.safetensors, one of mlx-lm's (`mlx_lm.lora`) adapter_config.json and adapters.safetensors. What
their tools compute otherwise than by a product of two matrices is refused here, by its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite, sqrt
from pathlib import Path

from qconvert.core.dtypes import Json, TensorSpec
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, SINGLE_FILE, SafetensorsFile
from qconvert.formats.io.strict_json import read_json_object

ADAPTER_CONFIG = "adapter_config.json"
PEFT_WEIGHTS, MLX_WEIGHTS = "adapter_model.safetensors", "adapters.safetensors"
WEIGHTS = (PEFT_WEIGHTS, MLX_WEIGHTS)

_PEFT_PREFIX = "base_model.model."
_ARRAYS = {
    # PEFT, of a linear: A [r, in] and B [out, r], as they are multiplied.
    ".lora_A.weight": "right", ".lora_B.weight": "left",
    # PEFT, of an embedding: A [r, vocabulary] and B [hidden, r]; mlx-lm: a [in, r] and b [r, out].
    ".lora_embedding_A": "left_T", ".lora_embedding_B": "right_T", ".lora_a": "right_T", ".lora_b": "left_T",
    # Rows of tokens (`trainable_token_indices`): new ones, although they are called a delta.
    ".token_adapter.trainable_tokens_delta": "rows",
    # DoRA.
    ".lora_magnitude_vector": "magnitude", ".lora_magnitude_vector.weight": "magnitude", ".m": "magnitude",
}  # fmt: skip
# What PEFT's `LoraConfig` can say that is no product of two matrices added to a weight of the same base.
_OTHER_ARITHMETIC = (
    "layer_replication", "alora_invocation_tokens",
    "use_qalora", "lora_bias", "megatron_config", "arrow_config",
)  # fmt: skip
# Initial weights for which PEFT takes something away from the base, too.
_CHANGED_BASES = ("pissa", "olora", "corda", "loftq")
_ORIGINAL = ".original_module."
# Of patterns, names and one `.*`: these are matched in no more than the square of a name's length.
_PLAIN_PATTERN = re.compile(r"\^?(?:[\w-]|\\?\.(?!\*))*(?:\.\*(?:[\w-]|\\?\.(?!\*))*)?\$?")
_EXPERTS = re.compile(r"(.*\.experts)(?:\.base_layer)*")
_MOST_RANK = 1 << 14
ELSEWHERE = "merge it with its own tool: merge_and_unload() in peft, then save_pretrained()"
"""The hint for what is not computed here."""
OTHER_BASE = "name the model that it was trained on: BASE+ADAPTER"
"""The hint for an adapter that does not fit its base."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a weight [out, in]: `scale * left [out, r] @ right [r, in]`, both named as stored.

    Arrays that lie `transposed` are [r, out] and [in, r]. With a `magnitude` [out] (DoRA), rows of the sum
    get these lengths. Of `experts`, the arrays hold the products of all: `expert` has the columns `expert`,
    `expert + experts`, ... of `left`, its rows from `first_row` on, and r rows of `right` that follow one
    another.
    """

    left: str
    right: str
    rank: int
    scale: float
    transposed: bool = False
    magnitude: str | None = None
    expert: int = 0
    experts: int = 1
    first_row: int = 0


@dataclass(frozen=True, slots=True)
class OfExperts:
    """Products of all experts of a layer (`target_parameters`): left [out, r experts], right [r experts, in].

    `module` is that of the experts. Which parameter they change is told by their shapes.
    """

    module: str
    left: str
    right: str
    scale: _Scale

    def of(self, parameter: str, expert: int, experts: int, rank: int, first_row: int) -> LowRank:
        """What is added to the weight of one expert, a part of a parameter of the module."""
        scale = self.scale.of(f"{self.module}.{parameter}", rank)
        low_rank = LowRank(self.left, self.right, rank, scale)
        return replace(low_rank, expert=expert, experts=experts, first_row=first_row)


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows of a tensor that an array [rows, width] holds: `array[i]` is row `indices[i]`."""

    array: str
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An opened adapter: what it adds to weights, and what it holds whole, by the names of tensors.

    `base` is what its config calls the model that it was trained on, "" where it does not say. With `tied`, a
    changed embedding that is the head, too, is changed as both.
    """

    path: Path
    base: str
    file: SafetensorsFile
    low_rank: Mapping[str, LowRank]
    whole: Mapping[str, str] = field(default_factory=dict)
    rows: Mapping[str, NewRows] = field(default_factory=dict)
    tied: bool = False
    experts: tuple[OfExperts, ...] = ()

    @property
    def label(self) -> str:
        """What it is, in words: `LoRA of rank 16, 112 linears`."""
        ranks = sorted({each.rank for each in self.low_rank.values()})
        rank = f" of rank {ranks[0]}" if len(ranks) == 1 else f" of ranks {ranks[0]} to {ranks[-1]}"
        kind = "DoRA" if any(each.magnitude for each in self.low_rank.values()) else "LoRA"
        told = [f"{kind}{rank}, {_count(len(self.low_rank), 'weight')}"] if self.low_rank else []
        told += [f"{_count(len(self.experts), 'stack')} of experts"] if self.experts else []
        told += [f"{_count(len(self.whole), 'tensor')} replaced"] if self.whole else []
        tokens = max((len(each.indices) for each in self.rows.values()), default=0)
        return ", ".join([*told, *([f"{_count(tokens, 'token')} replaced"] if tokens else [])])

    def spec(self, name: str) -> TensorSpec:
        """The element type and shape of one of its arrays."""
        return self.file.header.specs[name]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter and no weights of a model, or a file is that of an adapter.

    Some folders have the base's config beside it.
    """
    if path.is_file():
        return path.name.endswith(WEIGHTS) and config_path(path).is_file()
    whole = (path / name for name in (SINGLE_FILE, INDEX_FILE))
    return config_path(path).is_file() and not any(each.exists() for each in whole)


def config_path(path: Path) -> Path:
    """The config of an adapter, of which `path` is the folder or the file with its arrays."""
    return (path.parent if path.is_file() else path) / ADAPTER_CONFIG


def name_of_file(path: Path) -> str:
    """What the file of an adapter is called: as its folder, and with the number of one of mlx-lm's steps."""
    step = path.name.removesuffix(MLX_WEIGHTS).removesuffix("_")
    told = f"step{int(step)}" if step.isdecimal() else step
    return path.parent.name if path.name in WEIGHTS else f"{path.parent.name}-{told}"


def base_of(path: Path) -> str:
    """What an adapter's config calls its base; "" where it does not say. CorruptCheckpoint for no text."""
    config = read_json_object(config_path(path))
    base = config.get("base_model_name_or_path", config.get("model")) or ""
    if not isinstance(base, str):
        raise CorruptCheckpoint(f"{ADAPTER_CONFIG}: base_model_name_or_path is {shown(base)}, not a text")
    revision = config.get("revision")
    return f"{base}@{revision}" if base and isinstance(revision, str) and revision else base


def weights_of(folder: Path) -> Path:
    """The file with an adapter's arrays; UnsupportedModel where there is none to be read."""
    if folder.is_file():
        return folder
    found = next((folder / name for name in WEIGHTS if (folder / name).exists()), None)
    if found is not None:
        return found
    pickled = (folder / "adapter_model.bin").exists()
    fact = f"{folder.name}: holds {ADAPTER_CONFIG}, but no {PEFT_WEIGHTS}"
    hint = "save it again with save_pretrained(..., safe_serialization=True): pickles are never opened"
    raise UnsupportedModel(fact, hint if pickled else f"copy {PEFT_WEIGHTS} or {MLX_WEIGHTS} there")


def open_adapter(path: Path) -> Adapter:
    """Opens an adapter in a folder, or the one of these arrays; only their header is read.

    Raises UnsupportedModel for arithmetic that is not known here, CorruptCheckpoint where arrays and config
    disagree.
    """
    config = read_json_object(config_path(path))
    file = SafetensorsFile(weights_of(path))
    try:
        specs = file.header.specs
        scale = _mlx_scale(config) if "fine_tune_type" in config else _peft_scale(config)
        low_rank, whole, rows, experts = _arrays(specs.values(), scale, config)
    except BaseException:
        file.close()
        raise
    if not low_rank and not whole and not rows and not experts:
        file.close()
        raise CorruptCheckpoint(f"{file.header.path.name}: holds no arrays of an adapter")
    tied = "fine_tune_type" in config or bool(config.get("ensure_weight_tying"))
    return Adapter(path, base_of(path), file, low_rank, whole, rows, tied, experts)


class _Scale:
    """The factor of an adapter's products: `alpha / r`, by module where patterns say so."""

    def __init__(self, alpha: float, rank: int | None, patterns: Mapping[str, float], root: bool) -> None:
        self.alpha, self.rank, self.patterns, self.root = alpha, rank, patterns, root

    def of(self, module: str, rank: int) -> float:
        """Of one module, whose arrays have this rank (`LoraLayer.update_layer`, `scale_layer`)."""
        alpha = next((a for key, a in self.patterns.items() if _is_named(module, key)), self.alpha)
        if self.rank is None:
            return alpha
        return alpha / sqrt(rank) if self.root else alpha / rank


def _is_named(module: str, pattern: str) -> bool:
    """Whether PEFT's `get_pattern_key` takes a pattern for a module: the end of its name, or all of it."""
    return re.match(rf"(.*\.)?({pattern})$", module) is not None


def _peft_scale(config: Json) -> _Scale:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModel(f"{ADAPTER_CONFIG}: peft_type is {shown(kind)}, not LORA", ELSEWHERE)
    initial = str(config.get("init_lora_weights")).lower()
    odd = next((key for key in _OTHER_ARITHMETIC if config.get(key)), None)
    if odd is None and initial.startswith(_CHANGED_BASES):
        odd = f"init_lora_weights {shown(initial)} (which changes the base)"
    if odd is not None:
        raise UnsupportedModel(f"{ADAPTER_CONFIG}: {odd} is not known here", ELSEWHERE)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or not all(map(_PLAIN_PATTERN.fullmatch, patterns)):
        raise UnsupportedModel(
            f"{ADAPTER_CONFIG}: alpha_pattern {shown(patterns)} has more than names of modules", ELSEWHERE
        )
    alphas = {key: _number(value, "alpha_pattern") for key, value in patterns.items()}
    rank = config.get("r")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank <= _MOST_RANK:
        raise CorruptCheckpoint(f"{ADAPTER_CONFIG}: r is {shown(rank)}, not a rank of 1 to {_MOST_RANK:,}")
    return _Scale(
        _number(config.get("lora_alpha"), "lora_alpha"), rank, alphas, bool(config.get("use_rslora"))
    )


def _mlx_scale(config: Json) -> _Scale:
    """Of `mlx_lm.lora`: its `scale` is the factor itself (`LoRALinear.fuse`)."""
    kind, parameters = config.get("fine_tune_type"), config.get("lora_parameters")
    if kind not in ("lora", "dora"):
        raise UnsupportedModel(
            f"{ADAPTER_CONFIG}: fine_tune_type is {shown(kind)}, neither lora nor dora",
            "fuse it with its own tool: mlx_lm.fuse",
        )
    scale = parameters.get("scale") if isinstance(parameters, dict) else None
    return _Scale(_number(scale, "lora_parameters.scale"), None, {}, root=False)


def _number(value: object, key: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise CorruptCheckpoint(f"{ADAPTER_CONFIG}: {key} is {shown(value)}, not a number")
    return float(value)


def _arrays(
    specs: Iterable[TensorSpec], scale: _Scale, config: Json
) -> tuple[dict[str, LowRank], dict[str, str], dict[str, NewRows], tuple[OfExperts, ...]]:
    """The products by the names of the weights that they are added to; what is there whole; all experts'."""
    parts: dict[str, dict[str, TensorSpec]] = {}
    whole: dict[str, str] = {}
    rows: dict[str, NewRows] = {}
    for spec in specs:
        if _ORIGINAL in spec.name:  # what a module was before it was trained
            continue
        module, part = _part(spec.name)
        if part is None:
            whole[module] = spec.name
        elif part == "rows":
            rows[f"{module}.weight"] = NewRows(spec.name, _indices(module, spec, config))
        else:
            parts.setdefault(module, {})[part] = spec
    stacked = {module: found for module, found in parts.items() if _EXPERTS.fullmatch(module)}
    products = {
        f"{module}.weight": _product(module, found, scale)
        for module, found in parts.items()
        if module not in stacked
    }
    return products, whole, rows, tuple(_of_experts(*pair, scale) for pair in stacked.items())


def _of_experts(module: str, parts: Mapping[str, TensorSpec], scale: _Scale) -> OfExperts:
    product = _product(module, parts, scale)
    if product.transposed or product.magnitude:
        raise UnsupportedModel(f"{shown(module)}: stacks of mlx-lm's adapters are not known here", ELSEWHERE)
    return OfExperts(module.partition(".base_layer")[0], product.left, product.right, scale)


def _indices(module: str, spec: TensorSpec, config: Json) -> tuple[int, ...]:
    """The tokens whose rows an array holds: of this module, or of the embedding that a head is tied to."""
    told = config.get("trainable_token_indices")
    if isinstance(told, dict):
        told = next((told[key] for key in told if _is_named(module, key)), next(iter(told.values()), None))
    found = told if isinstance(told, list) else []
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in found):
        raise CorruptCheckpoint(f"{ADAPTER_CONFIG}: trainable_token_indices has more than numbers of tokens")
    if len(spec.shape) != 2 or len(found) != spec.rows or not spec.dtype.is_float:
        fact = f"{shown(spec.name)}: {spec.dtype.label} {list(spec.shape)} for {len(found):,} tokens"
        raise CorruptCheckpoint(f"{fact} of trainable_token_indices")
    return tuple(found)


def _part(name: str) -> tuple[str, str | None]:
    """The module that an array belongs to and what it is of it; of another tensor, its own name and None."""
    plain = name.removeprefix(_PEFT_PREFIX)
    for end, part in _ARRAYS.items():
        if plain.endswith(end):
            return plain.removesuffix(end), part
    for infix in (".token_adapter.", ".base_layer.", ".modules_to_save."):
        plain = plain.replace(infix, ".")
    if "lora_" in plain or "token_adapter" in plain:
        raise UnsupportedModel(f"{shown(name)}: an array of an adapter that is not known here", ELSEWHERE)
    return plain, None


def _product(module: str, parts: Mapping[str, TensorSpec], scale: _Scale) -> LowRank:
    transposed = "left_T" in parts or "right_T" in parts
    left, right = (parts.get(f"{side}_T" if transposed else side) for side in ("left", "right"))
    if left is None or right is None:
        raise CorruptCheckpoint(f"{shown(module)}: the adapter has {len(parts)} of its two matrices")
    if len(left.shape) != 2 or len(right.shape) != 2:
        shapes = f"{list(left.shape)} and {list(right.shape)}"
        raise UnsupportedModel(
            f"{shown(module)}: the adapter's arrays have shapes {shapes}, not those of matrices", ELSEWHERE
        )
    rank, other = (left.shape[0], right.shape[1]) if transposed else (left.shape[1], right.shape[0])
    if rank != other or not 1 <= rank <= _MOST_RANK:
        raise CorruptCheckpoint(f"{shown(module)}: matrices of ranks {rank} and {other}")
    if odd := next((spec for spec in parts.values() if not spec.dtype.is_float), None):
        raise UnsupportedModel(
            f"{shown(odd.name)}: {odd.dtype.label}, not a float of 16, 32 or 64 bits", "save it as float32"
        )
    magnitude = parts.get("magnitude")
    return LowRank(
        left.name, right.name, rank, scale.of(module, rank), transposed, magnitude.name if magnitude else None
    )
