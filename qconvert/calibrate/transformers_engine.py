"""Runs a checkpoint in transformers' own class, for statistics of families that our decoder does not run.

The class is transformers'; code that comes with a checkpoint is never run, nor is anything unpickled. The
whole model is in memory, in float32. transformers is no dependency: it is imported when it is asked for.
Legend: B windows, T tokens of a window.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch

from qconvert.calibrate.collect import Progress
from qconvert.calibrate.moment_sums import MomentSums
from qconvert.calibrate.moments import InputMoments, InputStatistics
from qconvert.calibrate.text import check_tokens, check_window
from qconvert.calibrate.watched_products import WatchedProducts
from qconvert.checkpoint.open import Checkpoint
from qconvert.core.dtypes import Json
from qconvert.core.statistics import InputKey
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel, shown
from qconvert.models import Architecture, FusedParameter
from qconvert.models.statistics_keys import inputs_of
from qconvert.runtime.device_layout import find_device
from qconvert.runtime.precision import exact_products

INSTALL = 'pip install "transformers>=5"'
BATCH_TOKENS = 2048
"""Tokens that are run together, unless one window has more."""
UNBOUNDED = 1 << 20
"""The positions of a model whose config names no number."""

# What a config.json may say that makes transformers load something else than this folder's plain weights.
_NOT_TAKEN = frozenset(
    (
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "fusion_config",
        "quantization_config",
        "transformers_weights",
        "_attn_implementation",
        "_attn_implementation_internal",
        "_experts_implementation",
        "_experts_implementation_internal",
    )
)


@dataclass(frozen=True, slots=True)
class Collected:
    """Statistics, the inputs of the model that are not in them, and what ran it, such as
    `transformers 5.0.0 GPT2LMHeadModel`.
    """

    statistics: InputStatistics
    left_out: tuple[InputKey, ...]
    engine: str


@dataclass(frozen=True, slots=True)
class TransformersModel:
    """A checkpoint that transformers has a class for, not loaded yet.

    `own_code`: config.json names classes of its own, which are not run.
    """

    checkpoint: Checkpoint
    config: Any
    class_name: str

    @staticmethod
    def of(checkpoint: Checkpoint) -> TransformersModel:
        """Read the config.

        Raises QConvertError where transformers is not installed, UnsupportedModel for a model that it has no
        class of its own for, or that does not predict the next token, and for weights that are no plain
        safetensors.
        """
        _require_plain(checkpoint)
        auto = _auto_classes()
        told, model_type = checkpoint.config, checkpoint.config.get("model_type")
        with _told_plainly("config.json"):
            known = isinstance(model_type, str) and model_type in auto.CONFIG_MAPPING
            config = auto.CONFIG_MAPPING[model_type].from_dict(_cleaned(told)) if known else None
            runs = known and type(config) in auto.MODEL_FOR_CAUSAL_LM_MAPPING
        if not runs or getattr(config, "is_encoder_decoder", False):
            raise _no_class(told, model_type, known=known)
        found = auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return TransformersModel(checkpoint, config, found.__name__)

    @property
    def positions(self) -> int:
        """The most tokens of a window."""
        found = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return found if isinstance(found, int) and found > 0 else UNBOUNDED

    @property
    def nbytes(self) -> int:
        """What the weights take in memory."""
        return 4 * sum(prod(tensor.shape) for tensor in self.checkpoint.tensors.values())

    @property
    def own_code(self) -> bool:
        """Whether config.json names classes that come with the checkpoint; they are not run."""
        return "auto_map" in self.checkpoint.config

    def collect(
        self, tokens_BT: np.ndarray, device: str = "cpu", progress: Progress | None = None
    ) -> Collected:
        """The statistics of every input over windows of tokens, int64 [B, T], as `collect_statistics` has
        them; those of which no product was seen, or not of every token, are left out.

        Raises BadRecipe for windows and tokens that the model cannot read, QConvertError for a model that is
        larger than this machine's memory, for numbers that are not finite, and where transformers fails.
        """
        check_window(tokens_BT.shape[1], self.positions)
        _require_memory(self.nbytes)
        model = self._load(device)
        vocab = int(model.get_input_embeddings().weight.shape[0])
        check_tokens(tokens_BT, self.positions, vocab)
        architecture = _spelled(self.checkpoint.architecture, model)
        sums, weights = MomentSums(), _weights_of(model, architecture)
        layers = 1 + max((key.layer for key in weights if key.layer is not None), default=0)
        shown_at = _Shown(sums, progress or (lambda done, total: None), layers, tokens_BT.size)
        self._run(model, tokens_BT, weights, shown_at)
        wanted = dict.fromkeys(inputs_of(architecture).values())
        sums.inputs = _whole(sums.inputs, tokens_BT.size)
        found = sums.statistics(architecture.shapes, tokens_BT, vocab)
        left_out = tuple(key for key in wanted if key not in found.inputs)
        return Collected(found, left_out, f"transformers {_version()} {self.class_name}")

    def _load(self, device: str) -> Any:
        """The model, in float32, each expert by itself where that can be asked for."""
        auto = _auto_classes()
        with _told_plainly(f"{self.checkpoint.path}"), _quiet():
            options: Json = {"dtype": torch.float32, "trust_remote_code": False, "use_safetensors": True}
            options |= {"local_files_only": True, "experts_implementation": "eager"}
            model, info = auto.AutoModelForCausalLM.from_pretrained(
                self.checkpoint.path, config=self.config, output_loading_info=True, **options
            )
            missing = sorted(info["missing_keys"])
            if missing:
                raise CorruptCheckpoint(
                    f"{shown(missing[0])}: {self.class_name} of transformers needs it, and {len(missing)} in"
                    " all are not in the checkpoint",
                    "use a checkpoint of the class that config.json names",
                )
            return model.eval().to(find_device(device))

    def _run(
        self, model: Any, tokens_BT: np.ndarray, weights: dict[InputKey, torch.Tensor], observe: _Shown
    ) -> None:
        head = model.get_output_embeddings()
        table = None if head is None else head.weight
        size = max(1, BATCH_TOKENS // tokens_BT.shape[1])
        with _told_plainly(self.class_name), torch.inference_mode(), exact_products(), _quiet():
            for first in range(0, len(tokens_BT), size):
                batch_BT = torch.from_numpy(tokens_BT[first : first + size]).to(model.device)
                observe.tokens = batch_BT.numel()
                with WatchedProducts(weights, observe, table):
                    model(input_ids=batch_BT, use_cache=False)
                observe.finish()


@dataclass(slots=True)
class _Shown:
    """Passes on what is seen, and tells how far a batch has come by the layers that were reached."""

    sums: MomentSums
    progress: Progress
    layers: int
    total: int
    tokens: int = 0
    before: int = 0
    layer: int = 0

    def __call__(self, key: InputKey, x_NI: torch.Tensor) -> None:
        self.sums(key, x_NI)
        if key.layer is not None and key.layer > self.layer:
            self.layer = key.layer
            self.progress(self.before * self.layers + self.layer * self.tokens, self.layers * self.total)

    def finish(self) -> None:
        """A batch is through."""
        self.before, self.layer = self.before + self.tokens, 0
        self.progress(self.before * self.layers, self.layers * self.total)


def _weights_of(model: Any, architecture: Architecture) -> dict[InputKey, torch.Tensor]:
    """One weight of every input: its own, the fused one that holds it, or its expert's part of a stack."""
    keys = inputs_of(architecture)
    found: dict[InputKey, torch.Tensor] = {}
    for name, tensor in model.named_parameters():
        for key, weight in _parts(name, tensor.detach(), architecture, keys):
            found.setdefault(key, weight)
    head = model.get_output_embeddings()
    if head is not None and (key := InputKey(("lm_head",))) in keys.values():
        found.setdefault(key, head.weight.detach())
    return found


def _parts(
    name: str, tensor: torch.Tensor, architecture: Architecture, keys: dict[str, InputKey]
) -> Iterator[tuple[InputKey, torch.Tensor]]:
    whole: FusedParameter | None = architecture.fused.get(name)
    if whole is None:
        if name in keys and tensor.dim() == 2:
            yield keys[name], tensor
        return
    members = [member.name for member in whole.members if member.name in keys]
    if whole.fusion.per_expert and tensor.dim() == 3:
        for member in members:
            expert = keys[member].expert
            if expert is not None and expert < len(tensor):
                yield keys[member], tensor[expert]
    elif members and tensor.dim() == 2:
        yield keys[members[0]], tensor


def _whole(inputs: dict[InputKey, InputMoments], tokens: int) -> dict[InputKey, InputMoments]:
    """The inputs of which every token was seen: those of a layer's experts together, as often as routed."""
    counts: dict[InputKey, int] = {}
    for key, moments in inputs.items():
        place = replace(key, expert=None)
        counts[place] = counts.get(place, 0) + moments.count
    return {key: m for key, m in inputs.items() if counts[replace(key, expert=None)] % tokens == 0}


def _spelled(architecture: Architecture, model: Any) -> Architecture:
    """The architecture with the names that the class has in memory, which may not be those of the files."""
    names = [name for name, _ in model.named_parameters()]
    return replace(architecture, spelling={}).spelled_like(names)


def _require_plain(checkpoint: Checkpoint) -> None:
    what = None
    if checkpoint.is_gguf or not checkpoint.path.is_dir():
        what = f"{checkpoint.path.name}: is one file, and transformers reads folders"
    elif checkpoint.quantization is not None:
        what = f"{checkpoint.path.name}: is quantized ({checkpoint.quantization})"
    elif (checkpoint.path / "adapter_config.json").exists():
        what = f"{checkpoint.path.name}: holds an adapter, for which transformers would load another model"
    if what is not None:
        raise UnsupportedModel(what, "give --engine transformers the folder of the model as it was trained")


def _no_class(config: Json, model_type: object, *, known: bool) -> UnsupportedModel:
    if known:
        return UnsupportedModel(
            f"config.json: model_type {model_type!r} predicts no next token in transformers",
            "`calibrate` runs language models that read text from left to right",
        )
    fact = f"config.json: transformers {_version()} has no class for model_type {shown(repr(model_type))}"
    if "auto_map" in config:
        fact += "; the code that comes with the checkpoint (auto_map) is not run"
    return UnsupportedModel(fact, f"a newer transformers may have one: {INSTALL}")


def _require_memory(nbytes: int) -> None:
    """Raise QConvertError for weights that this machine's memory cannot hold."""
    try:
        room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not told by this system
        return
    if nbytes > room:
        raise QConvertError(
            f"--engine transformers: holds the whole model, {nbytes / 1e9:,.1f} GB in float32; this machine"
            f" has {room / 1e9:,.1f} GB of memory",
            "use a machine with more memory, or an importance matrix that llama-imatrix measured",
        )


def _cleaned(config: Json) -> Json:
    """A config without the keys that lead elsewhere, in nested ones too."""
    return {key: _plain(value) for key, value in config.items() if key not in _NOT_TAKEN}


def _plain(value: object) -> object:
    """A value without those keys, and infinity as a number: transformers 5 saves an object for it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    return float(str(value["__float__"])) if set(value) == {"__float__"} else _cleaned(value)


def _auto_classes() -> Any:
    """transformers' module of classes by `model_type`."""
    try:
        import transformers
    except ImportError as error:
        raise QConvertError("--engine transformers: transformers is not installed", INSTALL) from error
    return transformers


def _version() -> str:
    return str(_auto_classes().__version__)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers logs while it loads and runs a model."""
    logging = _auto_classes().utils.logging
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _told_plainly(what: str) -> Iterator[None]:
    """Turns whatever transformers raises for a model into a sentence; it has no class of its own for that."""
    try:
        yield
    except QConvertError:
        raise
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "")
        raise QConvertError(
            f"{what}: transformers {_version()} failed: {type(error).__name__}: {shown(line)}",
            f"see whether it runs the model at all; another version may: {INSTALL}",
        ) from error
