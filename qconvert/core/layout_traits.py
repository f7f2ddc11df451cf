"""Describes a layout in data: what it can store, how, and which loaders read it.

A layout declares its traits in its own file under `formats/layouts`. The commands, the checks, the sizes,
the help texts and the hints are made from them, so that no other file needs to know a layout's name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, AffineMin, Codebook, GgmlBlocks, Quantized
from qconvert.core.schemes import SMALLER_GROUP_SIZES, Scheme

ALL_BITS = (2, 3, 4, 5, 6, 7, 8)
LOADERS = ("vllm", "sglang", "transformers", "llama.cpp", "ollama", "mlx")


@dataclass(frozen=True, slots=True)
class RoundingRules:
    """How the tools of a layout round numbers to codes of E4M3 and E2M1 where tools differ.

    With `rounds_scales`, E4M3 scales, and numbers divided by them, are rounded to the weights' own dtype,
    and no scale is 0. For E2M1: `halves` are rounded to "even" codes, or all magnitudes "up" or "down";
    `signed_zero` keeps the sign of what becomes zero; a power of two for a scale is the least one that
    reaches the largest number (`ceiling`), or a half of it where that is less than 1/8 too small; groups of
    zeros have the exponent `zero_exponent`.
    """

    rounds_scales: bool = False
    halves: Literal["even", "up", "down"] = "even"
    signed_zero: bool = True
    ceiling: bool = True
    zero_exponent: int = 0


NEAREST = RoundingRules()


@dataclass(frozen=True, slots=True)
class IntegerSchemes:
    """The integers of a layout: bits, group sizes, and whether zero points are stored.

    `group_sizes` None takes any size; () takes one scale per row alone. Otherwise a larger group or a whole
    row (where `per_row`, as it is) becomes several groups of one of these sizes, which must divide it. Those
    of `rows_alone` bits have one scale per row and no zero points.
    """

    bits: tuple[int, ...] = ALL_BITS
    group_sizes: tuple[int, ...] | None = None
    per_row: bool = True
    asymmetric: bool = True
    rows_alone: tuple[int, ...] = ()

    def accepts(self, scheme: Scheme) -> bool:
        """Whether weights quantized by the scheme can be stored, their scales repeated if need be."""
        size = scheme.group_size
        if scheme.bits in self.rows_alone:
            return size is None and scheme.symmetric
        fits = size is None or self.group_sizes is None or any(size % own == 0 for own in self.group_sizes)
        return scheme.bits in self.bits and fits and (self.asymmetric or scheme.symmetric)

    def nearest(self, bits: int) -> int:
        """The fewest bits that lose nothing of codes of `bits` bits, or the most there are."""
        return next((own for own in self.bits if own >= bits), self.bits[-1])

    @property
    def label(self) -> str:
        """The schemes as users write them: `int{2,3,4,8}[-asym][-g{N}|-channel]`."""
        number = "{2..8}" if self.bits == ALL_BITS else f"{{{','.join(map(str, self.bits))}}}"
        bits = number if len(self.bits) > 1 else str(self.bits[0])
        groups = "[-g{N}|-channel]" if self.group_sizes is None else "-channel"
        if self.group_sizes:
            groups = f"-g{{{','.join(map(str, sorted(self.group_sizes)))}}}"
        alone = "".join(f", int{each}-channel" for each in self.rows_alone)
        return f"int{bits}{'[-asym]' if self.asymmetric else ''}{groups}{alone}"


@dataclass(frozen=True, slots=True)
class CodebookScheme:
    """A scheme of codebook codes by its name: the encoding that weights get.

    With `scales_as_weights`, scales have the weights' own dtype (float32 for float64), not the encoding's;
    `nested` ones are quantized again; numbers are cast to `cast_first` before they are encoded.
    """

    name: str
    codebook: Codebook
    scales_as_weights: bool = False
    nested: bool = False
    cast_first: DType | None = None

    def encoding(self, dtype: DType) -> Codebook:
        """The encoding of weights of this dtype, before scales are nested."""
        scales = DType.F32 if dtype is DType.F64 else dtype
        own = scales if self.scales_as_weights else self.codebook.scale_dtype
        return replace(self.codebook, scale_dtype=own, decoded=dtype)


@dataclass(frozen=True, slots=True)
class LoaderLimit:
    """Something that loaders do not take, or take badly, in a layout that they read.

    `applies` says of which encodings. It is about every quantized weight, about the head alone (a quantized
    "head"), about "experts", about weights stored "fused" that the class has apart, or about the whole
    "model" (said once). `fact` may name {loader}, {layout}, {encoding} and {bits}. What loads only with
    something else than the loader itself "needs" it: a package, or an argument.
    """

    loaders: tuple[str, ...]
    severity: Literal["error", "needs", "warning", "note"]
    fact: str
    hint: str = ""
    applies: Callable[[Quantized], bool] = lambda encoding: True
    about: Literal["weight", "head", "experts", "fused", "model"] = "weight"
    needs: str = ""

    def said_of(self, encoding: Quantized, loader: str, layout: str) -> str:
        """The fact of one loader, one layout and one encoding."""
        return self.fact.format(loader=loader, layout=layout, encoding=encoding.label, bits=encoding.bits)


def with_packages(loader: str, *packages: str) -> LoaderLimit:
    """The limit of a layout that a loader reads with packages beside it, by their names on PyPI."""
    named = f"the package{'s' if len(packages) > 1 else ''} {' and '.join(packages)}"
    hint = f"pip install {' '.join(packages)}"
    fact = f"{{loader}} reads {{layout}} weights with {named}"
    return LoaderLimit((loader,), "needs", fact, hint, about="model", needs=named)


def beside_marlin(encoding: Quantized) -> bool:
    """Whether integers are none that SGLang's Marlin kernels multiply without zero points."""
    if not isinstance(encoding, AffineInt):
        return False
    sizes = (None, 32, 64, 128)  # MARLIN_SUPPORTED_GROUP_SIZES of its `marlin_utils.py`
    return not encoding.symmetric or encoding.bits not in (4, 8) or encoding.group_size not in sizes


# SGLang 0.5.23 has no other GPTQ kernel left (`quantization/gptq/schemes/gptq_linear.py`).
SGLANG_GPTQ = LoaderLimit(
    ("sglang",),
    "error",
    "SGLang runs GPTQ's integers of 4 and 8 bits without zero points, in groups of 32, 64 or 128 columns or "
    "whole rows, and this is {encoding}",
    "`qconvert convert --to compressed-tensors`",
    beside_marlin,
)


# Its classes of mixtures have experts as one 3-D parameter, which these methods do not fill.
RANDOM_EXPERTS = LoaderLimit(
    ("transformers",),
    "error",
    "transformers does not load experts in {layout}: they are left with random numbers",
    "`qconvert convert --to compressed-tensors`, or serve with vLLM",
    about="experts",
)


# Of the methods whose loaders leave heads out.
PLAIN_HEAD = LoaderLimit(
    ("vllm", "sglang", "transformers", "llama.cpp"),
    "error",
    "{loader} keeps the head plain in {layout}, and this one is {encoding}",
    "--keep lm_head, or convert --to compressed-tensors",
    about="head",
)


@dataclass(frozen=True, slots=True)
class LayoutTraits:
    """Everything that is said of a layout, for any model.

    Schemes. `integers` and `codebooks` are the schemes that weights can get (none: it is only read);
    `default_codebook` gives new weights the first of the codebooks where nothing is asked for. `scale_dtype`
    is the type that scales must have, None for any. `rounding` says how its tools round. `shared_zero_point`
    says that the config has one setting for all weights: with zero points or without.

    Tensors. `act_order` stores the group of every column. `packs` says along what codes share a 32-bit word;
    `folds` are, where groups of codes are interleaved in a word, the bits of a code, how many groups do,
    and the bytes of a word; `symmetric_zeros` stores zero points of symmetric weights too; `embeddings` that
    are quantized: none, with symmetric integers, or any. `experts` are stacked or not as the source has them
    ("any"), always one linear each ("apart"), or always in the input-major stacks of the model's class, and
    nothing else is quantized ("class").

    Config. `config_key` is where config.json has the settings; `settings_file` a file that repeats them,
    `settings_keys` those that only its settings have, of either file, where they name no method.

    Loaders. `readers` read it; `first_choice_of` lists those for which it is the layout to convert to;
    `stack_readers` those that take quantized stacks of experts; `ollama_decodes` is the table of the numbers
    that `ollama create` decodes to 16 bits, FP8 in blocks alone. `marlin` says that vLLM and SGLang run its
    integers with Marlin kernels, and compute scales in the model's dtype; `own_kernels` that in vLLM the
    layout's library multiplies linears, on any device but for packed minimums. `packed_zero_points` cannot be
    unpacked by transformers; loaders of `one_setting` read one for all linears of the layers, whatever else
    the config says. `method` is how the tool that it is named after chooses codes. `loads` begins the
    sentence of a model card, `serve` a command that serves a folder; `limits` are for `qconvert check`.

    Texts. `schemes` says what it stores where the generated text (`described`) does not do; `instead` is the
    hint for a layout that is not written.
    """

    name: str
    integers: IntegerSchemes | None = None
    codebooks: tuple[CodebookScheme, ...] = ()
    default_codebook: bool = False
    scale_dtype: DType | None = None
    rounding: RoundingRules = NEAREST
    shared_zero_point: bool = False
    act_order: bool = False
    packs: Literal["columns", "rows", "no"] = "columns"
    folds: tuple[tuple[int, int, int], ...] = ()
    symmetric_zeros: bool = False
    embeddings: Literal["plain", "symmetric", "any"] = "plain"
    experts: Literal["any", "apart", "class"] = "any"
    config_key: str = "quantization_config"
    settings_file: str = ""
    settings_keys: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    first_choice_of: tuple[str, ...] = ()
    stack_readers: tuple[str, ...] = ()
    ollama_decodes: str = ""
    marlin: bool = False
    own_kernels: bool = False
    packed_zero_points: bool = False
    one_setting: tuple[str, ...] = ()
    method: str = ""
    loads: str = "qconvert reads"
    serve: str = ""
    limits: tuple[LoaderLimit, ...] = ()
    schemes: str = ""
    instead: str = ""

    def codebook(self, name: str) -> CodebookScheme | None:
        """The codebook scheme of this name, or the first of several like it: `fp8` for `fp8-channel`."""
        exact = (scheme for scheme in self.codebooks if scheme.name == name)
        alike = (scheme for scheme in self.codebooks if scheme.name.startswith(f"{name}-"))
        return next(exact, None) or next(alike, None)

    def like(self, encoding: Quantized) -> CodebookScheme | None:
        """The scheme whose codes and blocks are those of an encoding, its scales aside."""

        def codes(codebook: Codebook) -> tuple[str, int | None, int | None]:
            return codebook.table, codebook.group_size, codebook.group_rows

        if not isinstance(encoding, Codebook):
            return None
        return next((s for s in self.codebooks if codes(s.codebook) == codes(encoding)), None)

    @property
    def absorbs_divisor(self) -> bool:
        """Whether it has NVFP4, but no number that divides all scales of a tensor."""
        return any(s.codebook.is_nvfp4 and s.codebook.second is None for s in self.codebooks)

    def nearest(self, encoding: Quantized | GgmlBlocks, width: int, *, symmetric: bool) -> Scheme:
        """The integers that come nearest to what a weight was, in rows of `width` columns.

        Where its groups are smaller than all of the layout's (16 columns of Q6_K, in MLX), groups of 64 with
        the next higher number of bits: their finer steps compensate for ranges that are shared.
        `symmetric` says whether they may, or must, do without zero points. The layout must have integers.
        """
        assert self.integers is not None, self.name
        bits, sizes = self.integers.nearest(encoding.bits), self.integers.group_sizes
        if sizes == ():
            return Scheme(bits, None)
        if isinstance(encoding, AffineInt) and (sizes is None or encoding.group_size in sizes):
            return Scheme(bits, encoding.group_size, encoding.symmetric and symmetric)
        fits = [size for size in SMALLER_GROUP_SIZES if width % size == 0]
        size = fits[0] if fits else None
        own = encoding.group_size if isinstance(encoding, AffineInt | AffineMin) else None
        if sizes and own and own < min(sizes):
            bits, size = self.integers.nearest(bits + 1), next((each for each in fits if each <= 64), size)
        return Scheme(bits, None if size == width and self.integers.per_row else size, symmetric)

    @property
    def described(self) -> str:
        integers = [self.integers.label] if self.integers else []
        return self.schemes or ", ".join([*integers, *(scheme.name for scheme in self.codebooks)])


# Of tensors in no particular layout.
NO_LAYOUT = LayoutTraits("")
