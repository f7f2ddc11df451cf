"""Finds what a loader will refuse or misread in a checkpoint, from names, shapes and encodings alone.

Every rule is a function from a subject to problems; it names the tensor, the loader's condition and the way
out. What is true of one layout alone is a limit in its traits. Sources: vLLM 0.33 (`linear.py` and
`quantization`: `auto_gptq.py`, `compressed_tensors`), SGLang 0.5.23 (`srt/models`), transformers 5.23 with
compressed-tensors 0.20, mlx-lm 0.32 (`utils.py`: load_model), Ollama 0.33 (`convert/convert.go`:
LoadModelMetadata, `convert/reader_safetensors.go`), read in source; vLLM 0.32, transformers, GPTQModel,
mlx-lm and llama.cpp also run on a CPU (`make clients`): docs/reference/clients.md has what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from qconvert.check.own_code import own_code
from qconvert.check.scheme_rules import SCHEME_RULES
from qconvert.check.shape_rules import SHAPE_RULES
from qconvert.check.subject import COMPUTED, ERROR, FUSING, NEEDS, NOTE, WARNING, Problem, Subject
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, GgmlBlocks, ModelTensor, Quantized, Unquantized
from qconvert.core.layout_traits import LoaderLimit
from qconvert.formats.layouts import registry
from qconvert.models.parameter_table import form_bytes
from qconvert.models.parameters import Fusion
from qconvert.plan.loader_notices import mixed_stacks


def lint(subject: Subject) -> list[Problem]:
    """All problems, errors first; rules that fire on many tensors name the first and count the rest.

    What is multiplied is not told of a model that the loader refuses.
    """
    rules = _GGUF_RULES if subject.layout == "gguf" else RULES
    found = [problem for rule in rules for problem in _gathered(rule(subject))]
    if any(problem.severity == ERROR for problem in found):
        found = [problem for problem in found if problem.subject != COMPUTED]
    order = (ERROR, NEEDS, WARNING, NOTE)
    return sorted(found, key=lambda problem: order.index(problem.severity))


def _gathered(problems: Iterator[Problem]) -> list[Problem]:
    first: dict[tuple[str, str], Problem] = {}
    more: dict[tuple[str, str], int] = {}
    for problem in problems:
        key = (problem.severity, problem.fact)
        more[key] = more.get(key, -1) + 1
        first.setdefault(key, problem)
    return [
        replace(p, subject=f"{p.subject} (and {more[key]} more)") if more[key] else p
        for key, p in first.items()
    ]


def _layout(s: Subject) -> Iterator[Problem]:
    """Does the loader read this layout at all."""
    if s.layout == "gguf":
        if s.loader not in _GGUF_READERS:
            fact = f"{s.loader} wants safetensors, not a GGUF file"
            yield Problem(ERROR, s.file, fact, "`qconvert from-gguf` makes them")
    elif s.loader == "llama.cpp":
        yield Problem(
            ERROR, "model.safetensors", "llama.cpp loads GGUF files only", "`qconvert to-gguf` makes one"
        )
    elif s.loader == "ollama":
        yield from _converted_by_ollama(s)
    elif s.quantized and s.loader not in s.traits.readers:
        first = next(each.name for each in registry.all_traits() if s.loader in each.first_choice_of)
        yield Problem(
            ERROR,
            s.quantized[0][1].name,
            f"{s.loader} does not read {s.layout} weights",
            f"`qconvert convert --to {first}`",
        )


_GGUF_READERS = ("llama.cpp", "ollama")
# Classes that `ollama create` converts from safetensors.
_OLLAMA_CLASSES = frozenset(
    {
        "LlamaForCausalLM",
        "MllamaForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Ministral3ForCausalLM",
        "MixtralForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma3ForConditionalGeneration",
        "Gemma3TextModel",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
        "Olmo3ForCausalLM",
        "BertModel",
        "NomicBertModel",
        "NomicBertMoEModel",
        "CohereForCausalLM",
        "GptOssForCausalLM",
        "DeepseekOCRForCausalLM",
        "DeepseekV3ForCausalLM",
        "Glm4MoeLiteForCausalLM",
        "LagunaForCausalLM",
        "GlmOcrForConditionalGeneration",
        "Lfm2ForCausalLM",
        "Lfm2MoeForCausalLM",
        "Lfm2VlForConditionalGeneration",
        "Qwen3NextForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "NemotronHForCausalLM",
    }
)


def _converted_by_ollama(s: Subject) -> Iterator[Problem]:
    """`ollama create` makes a GGUF of safetensors itself, of some classes.

    Their weights are plain, FP8 in blocks, which it decodes, or, of gpt-oss, MXFP4.
    """
    classes = s.architecture.config.get("architectures") or ["a model without `architectures`"]
    hint = "`qconvert to-gguf --modelfile` makes a file that it takes as it is"
    if classes[0] not in _OLLAMA_CLASSES:
        yield Problem(ERROR, "config.json", f"ollama does not convert {classes[0]} from safetensors", hint)
        return
    for _, tensor, encoding in s.quantized:
        codebook = encoding if isinstance(encoding, Codebook) else None
        decoded = codebook is not None and codebook.table == s.traits.ollama_decodes
        blocks = codebook is not None and codebook.table == "e4m3" and codebook.group_rows
        if decoded and blocks:
            fact = "ollama decodes it to 16 bits when it makes its GGUF"
            yield Problem(NOTE, tensor.name, fact)
        elif not decoded or (codebook is not None and codebook.table == "e4m3"):
            fact = f"ollama does not convert {encoding.label} of {s.layout} from safetensors"
            yield Problem(ERROR, tensor.name, fact, hint)


# Classes of mlx-lm 0.32 that know the names of packed weights (`sanitize`), or are made of one that does.
_PACKED_IN_MLX = frozenset(
    {"deepseek_v3", "glm_moe_dsa", "joyai_llm_flash", "kimi_k2", "kimi_k25", "kimi_k3", "kimi_vl", "mistral4"}
)


def _packed_in_mlx(s: Subject) -> Iterator[Problem]:
    """mlx-lm takes the config of packed weights for every class, and their names for a few."""
    known = s.architecture.config.get("model_type") in _PACKED_IN_MLX
    if s.loader == "mlx" and s.traits.packed_zero_points and s.quantized and not known:
        fact = "mlx-lm knows the names of packed weights only for DeepSeek-V3, Kimi and Mistral 4"
        yield Problem(ERROR, s.quantized[0][1].name, fact, "`qconvert convert --to mlx`")


def _limits(s: Subject) -> Iterator[Problem]:
    """What the layout's own traits say of this loader."""
    for limit in s.traits.limits:
        if s.loader not in limit.loaders:
            continue
        for name, encoding in _weights_of(s, limit):
            if limit.applies(encoding):
                fact = limit.said_of(encoding, s.loader, s.layout)
                subject = "config.json" if limit.about == "model" else name
                yield Problem(limit.severity, subject, fact, limit.hint, limit.needs)


def _weights_of(s: Subject, limit: LoaderLimit) -> list[tuple[str, Quantized]]:
    """The quantized weights that a limit is about."""
    if limit.about == "model":
        return [(tensor.name, encoding) for _, tensor, encoding in s.quantized[:1]]
    if limit.about == "fused":
        entries = ((name, s.architecture.fused.get(name)) for name in s.tensors)
        names = {name for name, entry in entries if entry is not None and _is_stored_fusion(entry.fusion)}
        return [
            (n, t.encoding) for n, t in s.tensors.items() if n in names and isinstance(t.encoding, Quantized)
        ]
    return [
        (tensor.name, encoding)
        for parameter, tensor, encoding in s.quantized
        if limit.about == "weight" or parameter.role.startswith(_ROLES[limit.about])
    ]


_ROLES = {"head": "lm_head", "experts": "mlp.experts."}


def _is_stored_fusion(fusion: Fusion) -> bool:
    """Whether linears of one layer are stored as one that the family's class has apart."""
    return not fusion.native and not fusion.per_expert


def _fused_groups(s: Subject) -> Iterator[Problem]:
    """Parts that a loader stacks need one scheme."""
    if s.loader not in FUSING:
        return
    for name, labels in mixed_stacks(s.tensors, s.architecture):
        fact = f"{s.loader} stacks its parts, which have different forms ({', '.join(labels)})"
        hint = "give all parts one scheme (`convert` a GGUF with --scheme int4-asym-g32 --allow-requantize)"
        yield Problem(ERROR, name, fact, hint)


def _stored_fusions(s: Subject) -> Iterator[Problem]:
    """Names that only some loaders know."""
    if s.loader == "sglang" and _DOTTED_IN_SGLANG.intersection(s.architecture.family.model_types[:1]):
        return
    for name in s.tensors:
        fused = s.architecture.fused.get(name)
        if fused is None or not _is_stored_fusion(fused.fusion):
            continue
        if s.loader != "vllm":
            fact = f"{s.loader} knows the parts of this fused linear only"
            yield Problem(ERROR, name, fact, "`qconvert unfuse`")


# Classes of SGLang whose table of fused names begins each with a dot; qwen2 and qwen3 have bare ones.
_DOTTED_IN_SGLANG = frozenset({"llama", "mistral"})


def _stacks(s: Subject) -> Iterator[Problem]:
    """Experts stored as 3-D tensors, or apart where the class holds the stack."""
    fused = [e for e in s.architecture.fused.values() if e.fusion.per_expert and not e.fusion.layout]
    parts = {part.name: entry for entry in fused for part in entry.members}
    for name, tensor in s.tensors.items():
        entry = s.architecture.fused.get(name)
        coded = isinstance(tensor.encoding, Quantized)
        if entry is not None and entry.fusion.layout:
            continue  # of a layout that other loaders do not read at all
        if entry is not None and entry.fusion.per_expert:
            known = s.loader in s.traits.stack_readers if coded else s.loader == "transformers"
            if coded and not known:
                fact = f"{s.loader} finds no module for a quantized stack of experts"
                yield Problem(ERROR, name, fact, "`qconvert unfuse --only experts`")
            elif not known and not entry.fusion.native:
                fact = f"{s.loader} wants the linears of each expert for this family"
                yield Problem(ERROR, name, fact, "`qconvert unfuse --only experts`")
        elif coded and name in parts and parts[name].fusion.native and s.loader == "transformers":
            fact = "transformers holds these experts as one 3-D parameter, and finds no packed one"
            yield Problem(ERROR, name, fact, "serve with vLLM, or `qconvert dequantize`")


def _scales(s: Subject) -> Iterator[Problem]:
    """vLLM keeps scales in the dtype that the model computes in."""
    dtype = _computed(s)
    for tensor, encoding in _rounded_scales(s):
        fact = f"vLLM rounds its {encoding.scale_dtype.label} scales to {dtype.label} on loading"
        hint = f"serve with {_dtype_argument(encoding)}"
        if s.device == "cpu" and encoding.scale_dtype is DType.F32 and encoding.bits == 4:
            hint = "write it with --dtype bf16: on a CPU, int4 stops at the first prompt in float32"
        yield Problem(WARNING, tensor.name, fact, hint)


def _computed(s: Subject) -> DType:
    """What vLLM computes in unless told: "Downcast for float32 models"."""
    return DType.BF16 if s.dtype in (DType.F32, None) else s.dtype


def _rounded_scales(s: Subject) -> Iterator[tuple[ModelTensor, AffineInt]]:
    """The integers whose scales vLLM rounds."""
    if s.loader == "vllm" and s.traits.marlin and s.dtype is not None:
        for _, tensor, encoding in s.quantized:
            if isinstance(encoding, AffineInt) and encoding.scale_dtype is not _computed(s):
                yield tensor, encoding


def serving_arguments(s: Subject) -> str:
    """What a command that serves it is given so that no scale is rounded: `--dtype float16`, or nothing."""
    found = {_dtype_argument(encoding) for _, encoding in _rounded_scales(s)}
    return found.pop() if len(found) == 1 else ""


def _dtype_argument(encoding: AffineInt) -> str:
    return f"--dtype {_VLLM_NAMES[encoding.scale_dtype]}"


_VLLM_NAMES = {DType.F16: "float16", DType.BF16: "bfloat16", DType.F32: "float32", DType.F64: "float64"}


def _names(s: Subject) -> Iterator[Problem]:
    """Unexpected tensors, but for vision towers; a head that a tied model does not use."""
    for name in s.unknown:
        if s.architecture.carries(name):
            continue
        yield Problem(
            WARNING, name, f"not a tensor of {s.architecture.family.name}", "loaders ignore it or stop"
        )
    for parameter, tensor in s.weights:
        if parameter.role == "lm_head" and s.architecture.tied:
            fact = "stored, though config.json ties the head to the embedding; loaders ignore one of the two"
            yield Problem(WARNING, tensor.name, fact, "`qconvert tie` or `qconvert untie`")


def _vocabulary(s: Subject) -> Iterator[Problem]:
    """A token beyond the table is an index error on the first prompt that holds it."""
    for parameter, tensor in s.weights:
        if parameter.kind == "embedding" and s.tokens is not None and s.tokens > tensor.shape[0]:
            fact = f"the tokenizer knows {s.tokens} tokens, the table has {tensor.shape[0]} rows"
            yield Problem(ERROR, tensor.name, fact, "use tokenizer and weights from one checkpoint")
        elif parameter.kind == "embedding" and s.tokens is not None and s.tokens < tensor.shape[0]:
            fact = f"{tensor.shape[0] - s.tokens} rows beyond the tokenizer's {s.tokens} tokens are padding"
            yield Problem(NOTE, tensor.name, fact)


def _products(s: Subject) -> Iterator[Problem]:
    """What is multiplied, where config.json has a say in it."""
    if s.loader in _ROUNDING_INPUTS and s.products:
        yield Problem(NOTE, COMPUTED, f"{s.loader} computes {', '.join(map(str, s.products))}")


_ROUNDING_INPUTS = ("vllm", "sglang", "transformers")


def _leftovers(s: Subject) -> Iterator[Problem]:
    """What stayed in 16 or 32 bits, in bytes."""
    if not s.quantized:
        return
    plain: dict[str, int] = {}
    for parameter, tensor in s.weights:
        if isinstance(tensor.encoding, Unquantized):
            plain[parameter.group] = plain.get(parameter.group, 0) + form_bytes(tensor.encoding, tensor.shape)
    for role, nbytes in sorted(plain.items(), key=lambda item: -item[1]):
        yield Problem(NOTE, role, f"{nbytes:,} bytes are not quantized")


RULES: tuple[Callable[[Subject], Iterator[Problem]], ...] = (
    _layout,
    _packed_in_mlx,
    _limits,
    _fused_groups,
    _stored_fusions,
    _stacks,
    *SCHEME_RULES,
    *SHAPE_RULES,
    own_code,
    _scales,
    _names,
    _vocabulary,
    _products,
    _leftovers,
)


def _new_types(s: Subject) -> Iterator[Problem]:
    """GGUF types that builds of llama.cpp may lack: that of cyllama 0.2.18 refuses the file."""
    for name, tensor in s.tensors.items():
        if isinstance(tensor.encoding, GgmlBlocks) and tensor.encoding.type == "Q2_0":
            needs = f"a {s.loader} that has the type Q2_0"
            fact = f"Q2_0 is a type that few builds of {s.loader} have"
            yield Problem(NEEDS, name, fact, "`qconvert to-gguf --type tq2_0`, or build it again", needs)


# The other rules are about safetensors: llama.cpp, which Ollama runs too, takes GGUF files as they are.
_GGUF_RULES = (_layout, _new_types)
