"""What a loader will refuse or misread in a checkpoint, found from names, shapes and forms alone.

Every rule is a function from a subject to problems; a rule names the tensor, the loader's condition
and the way out. Sources: vLLM 0.33 (`quantization/auto_gptq.py`, `compressed_tensors`, `linear.py`),
SGLang 0.5.23 (`srt/models`), transformers 5.23 with compressed-tensors 0.20, mlx-lm 0.32 (`utils.py`),
read in source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from qconvert.architecture import Architecture, Place
from qconvert.census import form_bytes
from qconvert.parallel import INPUT_SPLIT, whole_unit
from qconvert.tensors import DType, GroupInt, Logical, Plain, Quantized

LOADERS = ("vllm", "sglang", "transformers", "llama.cpp", "mlx")
ERROR, WARNING, NOTE = "error", "warning", "note"
# Loaders that stack q, k, v and gate, up into one matrix with one scheme.
_FUSING = ("vllm", "sglang")
_READS = {
    "vllm": ("compressed-tensors", "gptq", "gptq_v2", "awq", "bitsandbytes", "fp8", "mxfp4", "torchao"),
    "sglang": ("compressed-tensors", "gptq", "gptq_v2", "awq", "bitsandbytes", "fp8", "mxfp4", "torchao"),
    "transformers": (
        "compressed-tensors",
        "gptq",
        "gptq_v2",
        "awq",
        "bitsandbytes",
        "fp8",
        "mxfp4",
        "torchao",
    ),
    "llama.cpp": (),
    "mlx": ("mlx",),
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a loader trips over (error), may trip over (warning), or that is worth knowing."""

    severity: str
    subject: str
    fact: str
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """A checkpoint and who is to load it: on `tp` ranks, computing in `dtype`.

    `tokens` is the number of tokens the tokenizer knows, None when that is not known; `unknown` are
    tensors that the architecture does not declare.
    """

    tensors: Mapping[str, Logical]
    architecture: Architecture
    layout: str
    loader: str
    tp: int = 1
    dtype: DType | None = None
    tokens: int | None = None
    unknown: tuple[str, ...] = ()

    @property
    def weights(self) -> Iterator[tuple[Place, Logical]]:
        """The weights of linears and embeddings, with their places."""
        for name, tensor in self.tensors.items():
            place = self.architecture.place(name)
            if place is not None and place.part == "weight" and place.kind in ("linear", "embedding"):
                yield place, tensor

    @property
    def quantized(self) -> list[tuple[Place, Logical, Quantized]]:
        """Those that are quantized, with their forms."""
        return [(place, t, t.form) for place, t in self.weights if isinstance(t.form, Quantized)]


def lint(subject: Subject) -> list[Problem]:
    """All problems, errors first; rules that fire on many tensors name the first and count the rest."""
    found = [
        problem
        for rule in (_GGUF_RULES if subject.layout == "gguf" else RULES)
        for problem in _gathered(rule(subject))
    ]
    order = (ERROR, WARNING, NOTE)
    return sorted(found, key=lambda problem: order.index(problem.severity))


def _gathered(problems: Iterator[Problem]) -> list[Problem]:
    first: dict[tuple[str, str], Problem] = {}
    more: dict[tuple[str, str], int] = {}
    for problem in problems:
        key = (problem.severity, problem.fact)
        more[key] = more.get(key, -1) + 1
        first.setdefault(key, problem)
    return [
        Problem(p.severity, f"{p.subject} (and {more[key]} more)" if more[key] else p.subject, p.fact, p.hint)
        for key, p in first.items()
    ]


def _layout(s: Subject) -> Iterator[Problem]:
    """Does the loader read this layout at all."""
    if s.layout == "gguf":
        if s.loader != "llama.cpp":
            fact = f"{s.loader} wants safetensors, not a GGUF file"
            yield Problem(ERROR, "model.gguf", fact, "`qconvert from-gguf` makes them")
    elif s.loader == "llama.cpp":
        yield Problem(
            ERROR, "model.safetensors", "llama.cpp loads GGUF files only", "`qconvert to-gguf` makes one"
        )
    elif s.quantized and s.layout not in _READS[s.loader]:
        yield Problem(
            ERROR,
            s.quantized[0][1].name,
            f"{s.loader} does not read {s.layout} weights",
            f"`qconvert convert --to {_READS[s.loader][0]}`",
        )


def _gptq(s: Subject) -> Iterator[Problem]:
    """vLLM's GPTQ kernels ignore zeros and the order of columns."""
    if s.loader != "vllm" or not s.layout.startswith("gptq"):
        return
    for _, tensor, form in s.quantized:
        if not isinstance(form, GroupInt):
            continue
        if not form.symmetric or form.bits not in (4, 8):
            fact = "vLLM runs symmetric GPTQ of 4 and 8 bits only"
            yield Problem(ERROR, tensor.name, fact, "`qconvert convert --to compressed-tensors`")
        if form.act_order and form.group_size is not None:
            yield Problem(
                ERROR, tensor.name, "vLLM refuses desc_act unless group_size is -1", "quantize without"
            )


def _fused_groups(s: Subject) -> Iterator[Problem]:
    """Parts that a loader stacks need one scheme."""
    if s.loader not in _FUSING:
        return
    for fused in s.architecture.fused.values():
        forms = {s.tensors[part.name].form for part in fused.parts if part.name in s.tensors}
        if len(forms) > 1:
            labels = ", ".join(sorted(form.label for form in forms))
            fact = f"{s.loader} stacks its parts, which have different forms ({labels})"
            yield Problem(ERROR, fused.whole.name, fact, "give all parts one scheme")


def _stored_fusions(s: Subject) -> Iterator[Problem]:
    """Names that only some loaders know."""
    if s.loader == "vllm":
        return
    for name in s.tensors:
        fused = s.architecture.fused.get(name)
        if fused is not None and not fused.fusion.native:
            yield Problem(
                ERROR, name, f"{s.loader} knows the parts of this fused linear only", "`qconvert unfuse`"
            )


def _embeddings(s: Subject) -> Iterator[Problem]:
    """Quantized tables."""
    if s.loader == "mlx":
        return
    for place, tensor, form in s.quantized:
        if place.kind != "embedding":
            continue
        fits = isinstance(form, GroupInt) and form.symmetric and 32 % form.bits == 0
        if s.loader != "vllm" or not fits or s.architecture.tied:
            fact = f"{s.loader} does not load an embedding quantized like this ({form.label})"
            yield Problem(ERROR, tensor.name, fact, "keep the embedding plain")


def _zero_points(s: Subject) -> Iterator[Problem]:
    """transformers cannot unpack packed zero points when it runs weights compressed."""
    if s.loader != "transformers" or s.layout != "compressed-tensors":
        return
    for _, tensor, form in s.quantized:
        if isinstance(form, GroupInt) and not form.symmetric:
            fact = "transformers fails on packed zero points"
            hint = "load with CompressedTensorsConfig(dequantize=True)"
            yield Problem(WARNING, tensor.name, fact, hint)


def _parallel(s: Subject) -> Iterator[Problem]:
    """Whole groups, blocks and words on every rank."""
    if s.tp == 1 or s.loader not in _FUSING:
        return
    for place, tensor in s.weights:
        size = tensor.width if place.group in INPUT_SPLIT else tensor.shape[0]
        split = "columns" if place.group in INPUT_SPLIT else "rows"
        if size % s.tp and place.kind == "linear" and place.role != "lm_head":
            yield Problem(
                ERROR,
                tensor.name,
                f"{size} {split} do not divide among {s.tp} ranks",
                f"--tp {_less(size, s.tp)}",
            )
            continue
        unit = whole_unit(tensor.form, split, s.layout)
        if unit > 1 and size // s.tp % unit:
            fact = f"{size} {split} on {s.tp} ranks are {size // s.tp} each, not a multiple of {unit}"
            yield Problem(ERROR, tensor.name, fact, "use fewer ranks or a smaller group size")


def _less(size: int, tp: int) -> int:
    return max(n for n in range(1, tp + 1) if size % n == 0)


def _scales(s: Subject) -> Iterator[Problem]:
    """vLLM keeps scales in the dtype that the model computes in."""
    if s.loader != "vllm" or s.layout != "compressed-tensors" or s.dtype is None:
        return
    for _, tensor, form in s.quantized:
        if isinstance(form, GroupInt) and form.scale_dtype is not s.dtype:
            fact = f"vLLM rounds its {form.scale_dtype.label} scales to {s.dtype.label} on loading"
            yield Problem(WARNING, tensor.name, fact, f"serve with --dtype {_VLLM_NAMES[form.scale_dtype]}")


_VLLM_NAMES = {DType.F16: "float16", DType.BF16: "bfloat16", DType.F32: "float32", DType.F64: "float64"}


def _names(s: Subject) -> Iterator[Problem]:
    """Tensors nobody asked for, and a head that a tied model has no use for."""
    for name in s.unknown:
        yield Problem(
            WARNING, name, f"not a tensor of {s.architecture.family.name}", "loaders ignore it or stop"
        )
    for place, tensor in s.weights:
        if place.role == "lm_head" and s.architecture.tied:
            fact = "stored, though config.json ties the head to the embedding; loaders ignore one of the two"
            yield Problem(WARNING, tensor.name, fact, "`qconvert tie` or `qconvert untie`")


def _vocabulary(s: Subject) -> Iterator[Problem]:
    """A token beyond the table is an index error on the first prompt that holds it."""
    for place, tensor in s.weights:
        if place.kind == "embedding" and s.tokens is not None and s.tokens > tensor.shape[0]:
            fact = f"the tokenizer knows {s.tokens} tokens, the table has {tensor.shape[0]} rows"
            yield Problem(ERROR, tensor.name, fact, "take tokenizer and weights from one checkpoint")


def _leftovers(s: Subject) -> Iterator[Problem]:
    """What stayed in 16 or 32 bits, in bytes."""
    if not s.quantized:
        return
    plain: dict[str, int] = {}
    for place, tensor in s.weights:
        if isinstance(tensor.form, Plain):
            plain[place.group] = plain.get(place.group, 0) + form_bytes(tensor.form, tensor.shape)
    for role, nbytes in sorted(plain.items(), key=lambda item: -item[1]):
        yield Problem(NOTE, role, f"{nbytes:,} bytes are not quantized")


RULES: tuple[Callable[[Subject], Iterator[Problem]], ...] = (
    _layout,
    _gptq,
    _fused_groups,
    _stored_fusions,
    _embeddings,
    _zero_points,
    _parallel,
    _scales,
    _names,
    _vocabulary,
    _leftovers,
)
# The other rules are about safetensors: of GGUF files there is one reader, and it takes them as they are.
_GGUF_RULES = (_layout,)
