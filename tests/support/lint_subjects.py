"""What the rules of loaders are asked about: a small model, with one thing changed."""

from __future__ import annotations

from qconvert.check.loader_rules import lint
from qconvert.check.subject import NOTE, Problem, Subject
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt, Codebook, Encoding, ModelTensor, Unquantized
from qconvert.models import Architecture
from tests.support.models import tiny_config, tiny_shapes

INT4 = AffineInt(4, 32, True, DType.BF16)
ASYM = AffineInt(4, 32, False, DType.BF16)
FP8 = Codebook("e4m3", 128, DType.F32, DType.BF16, group_rows=128)
NF4 = Codebook("nf4", 64, DType.F32, DType.BF16)
# Keyword arguments of `subject` that are sizes of the model, and the config keys they set.
SIZES = {
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "intermediate": "intermediate_size",
}


def subject(
    encodings: dict[str, Encoding],
    layout: str = "compressed-tensors",
    loader: str = "vllm",
    tied: bool = True,
    **how: object,
) -> Subject:
    """A tiny model whose tensors have these forms, by what their names end with; the rest is bf16."""
    config = tiny_config("qwen2", tied=tied, **{SIZES[key]: how.pop(key) for key in set(how) & set(SIZES)})
    tensors = {}
    for name, shape in tiny_shapes(config).items():
        encoding = next(
            (encoding for end, encoding in encodings.items() if name.endswith(end)), Unquantized(DType.BF16)
        )
        tensors[name] = ModelTensor(name, shape, encoding)
    return Subject(tensors, Architecture.of(config), layout, loader, dtype=DType.BF16, **how)  # type: ignore[arg-type]


def serious(s: Subject) -> list[Problem]:
    return [problem for problem in lint(s) if problem.severity != NOTE]
