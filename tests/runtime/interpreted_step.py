"""The kernels of the decode step in Triton's interpreter, against the torch functions that define them.

Run by test_cuda_step.py in a process of its own: TRITON_INTERPRET counts only before the first import.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import Value
from qconvert.errors import QConvertError
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cuda.activation import Parts, Rows, empty_rows
from qconvert.runtime.cuda.attention import (
    HeadNorms,
    HeadShape,
    Place,
    attend,
    combine,
    empty_softmaxes,
)
from qconvert.runtime.cuda.decode_step import CudaStep, obstacle, open_step, read, read_greedily
from qconvert.runtime.cuda.head import HiddenStates, score_hidden_states
from qconvert.runtime.cuda.norm import add_norm
from qconvert.runtime.cuda.packing import MmaWeight
from qconvert.runtime.cuda.swiglu import swiglu
from qconvert.runtime.cuda.triton_language import INTERPRET
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.load import load_decoder
from qconvert.runtime.rope import rotate
from qconvert.runtime.storage import IntWeight
from tests.runtime.test_decoder_linear import random_value
from tests.support.cuda_reference import (
    add_norm_reference,
    attend_reference,
    bounds,
    combine_reference,
    fill_rows,
    score_reference,
    swiglu_reference,
    whole,
)
from tests.support.decoder_models import StateDict, decoder_of, tiny, tokens

CPU = torch.device("cpu")
assert INTERPRET


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parts_of(splits: int, rows: int, width: int, *, bias: bool, seed: int = 0) -> Parts:
    return Parts(
        normal(splits, rows, width, seed=seed), normal(width, seed=seed + 1).bfloat16() if bias else None
    )


def close(got: Tensor, want: Tensor, tolerance: float = 2e-6) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    assert float((got - want).abs().max()) <= tolerance * float(want.abs().max())


def same_rows(got: Rows, want: Rows) -> None:
    """Equal but for a rare last bit, where float32 sums of another order round to another bfloat16."""
    steps = (got.x_MK.view(torch.int16).int() - want.x_MK.view(torch.int16).int()).abs()
    assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 2e-3
    if want.sums_GM is None or got.sums_GM is None:
        assert got.sums_GM is want.sums_GM is None
        return
    again = empty_rows(*got.x_MK.shape, got.group, CPU, len(got.sums_GM))
    fill_rows(again, got.x_MK)
    assert again.sums_GM is not None
    close(got.sums_GM, again.sums_GM)


@pytest.mark.parametrize(
    ("rows", "width", "group", "splits", "bias"),
    [(1, 896, 128, 0, False), (1, 896, 128, 4, False), (3, 1536, 64, 2, True), (2, 320, 128, 1, True),
     (1, 1024, 32, 3, False), (2, 48, 128, 2, False), (1, 3584, 0, 2, False), (5, 96, 32, 1, True)],
)  # fmt: skip
def test_norms(rows: int, width: int, group: int, splits: int, bias: bool) -> None:
    added = parts_of(splits, rows, width, bias=bias) if splits else None
    residual, weight = normal(rows, width, seed=5) * 3, normal(width, seed=6).bfloat16()
    want, got = (empty_rows(rows, width, group, CPU) for _ in range(2))
    other = residual.clone()
    add_norm_reference(added, residual, weight, 1e-6, want)
    add_norm(added, other, weight, 1e-6, got)
    close(other, residual)
    same_rows(got, want)


@pytest.mark.parametrize(
    ("rows", "width", "group", "splits", "bias"),
    [(1, 4864, 128, 2, False), (3, 768, 64, 1, True), (2, 80, 128, 3, False), (1, 1100, 0, 2, True),
     (1, 640, 32, 4, False)],
)  # fmt: skip
def test_gates(rows: int, width: int, group: int, splits: int, bias: bool) -> None:
    gate_up = parts_of(splits, rows, 2 * width, bias=bias)
    want, got = (empty_rows(rows, width, group, CPU) for _ in range(2))
    swiglu_reference(gate_up, want)
    swiglu(gate_up, got)
    same_rows(got, want)


QWEN25 = HeadShape(14, 2, 64, None)
QWEN3 = HeadShape(4, 2, 128, None)
TINY = HeadShape(6, 2, 8, 20)
MISTRAL = HeadShape(8, 2, 64, 100)
LLAMA = HeadShape(2, 2, 96, None)


def near(got: Tensor, want: Tensor) -> None:
    """Float32 equal, but for a few values that a query's last bit of bfloat16 has moved."""
    error = (got - want).abs() / want.abs().max()
    assert float(error.max()) <= 4e-3 and float((error <= 2e-6).float().mean()) >= 0.75


def place_at(position: int, room: int, head_dim: int) -> Place:
    angle = normal(room, head_dim // 2, seed=9)
    cos, sin = angle.cos(), angle.sin()
    return Place(torch.tensor([position]), torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))


@pytest.mark.parametrize(
    ("shape", "bias", "norms", "rows", "stretches", "position"),
    [
        *((QWEN25, True, False, 1, 2, position) for position in (0, 1, 64, 65, 129, 200)),
        *((QWEN3, False, True, 1, 4, position) for position in (0, 63, 128, 300)),
        *((TINY, True, True, 2, 2, position) for position in (0, 5, 19, 20, 70, 300)),
        *((MISTRAL, False, False, 1, 2, position) for position in (2, 99, 100, 170)),
        *((LLAMA, False, False, 2, 2, position) for position in (1, 66)),
    ],
)
def test_attention(
    shape: HeadShape, bias: bool, norms: bool, rows: int, stretches: int, position: int
) -> None:
    width, room = (shape.heads + 2 * shape.kv_heads) * shape.head_dim, position + 3
    qkv = parts_of(3, rows, width, bias=bias, seed=position)
    weights = (normal(shape.head_dim, seed=seed).bfloat16() for seed in (7, 8))
    head_norms = HeadNorms(*weights, 1e-6) if norms else None
    place = place_at(position, room, shape.head_dim)
    cache = normal(2, rows, shape.kv_heads, room, shape.head_dim, seed=10).bfloat16()
    caches = [cache.clone() for _ in range(2)]
    softmaxes = [empty_softmaxes(rows, shape, stretches, CPU) for _ in range(2)]
    for function, own, out in zip((attend_reference, attend), caches, softmaxes, strict=True):
        for part in (out.max_MHP, out.sum_MHP, out.value_MHPE):
            part.fill_(torch.nan)
        function(qkv, head_norms, shape, place, own, out)
    want, got = softmaxes
    steps = (caches[0].view(torch.int16).int() - caches[1].view(torch.int16).int()).abs()
    assert int(steps.max()) <= 1 and int((steps > 0).sum()) <= 2
    assert not torch.equal(caches[0][:, :, :, position], cache[:, :, :, position])
    there = want.max_MHP > -torch.inf
    assert torch.equal(got.max_MHP > -torch.inf, there)
    for part, wanted in (
        (got.max_MHP, want.max_MHP), (got.sum_MHP, want.sum_MHP), (got.value_MHPE, want.value_MHPE)
    ):  # fmt: skip
        near(part[there], wanted[there])
    want_rows, got_rows = (empty_rows(rows, shape.heads * shape.head_dim, 64, CPU) for _ in range(2))
    combine_reference(want, want_rows)
    combine(want, got_rows)
    same_rows(got_rows, want_rows)


@pytest.mark.parametrize(("window", "stretches"), [(None, 4), (100, 2), (1, 2), (7, 4)])
def test_stretches_cover_what_the_token_sees(window: int | None, stretches: int) -> None:
    for position in range(700):
        seen = [t for start, stop in bounds(position, window, stretches) for t in range(start, stop)]
        first = 0 if window is None else max(0, position - window + 1)
        assert seen == list(range(first, position))


def test_an_attention_of_stretches_is_attention() -> None:
    """What the two references define together, against torch's own attention."""
    shape, position, rows = HeadShape(6, 2, 16, 90), 150, 2
    qkv = parts_of(1, rows, 10 * 16, bias=False)
    place = place_at(position, 160, 16)
    cache = normal(2, rows, 2, 160, 16, seed=3).bfloat16()
    softmaxes, out = empty_softmaxes(rows, shape, 4, CPU), empty_rows(rows, 96, 0, CPU)
    attend_reference(qkv, None, shape, place, cache, softmaxes)
    combine_reference(softmaxes, out)
    q_MHE = whole(qkv).view(rows, 10, 16)[:, :6]
    q_MHE = (
        rotate(q_MHE[:, None], place.cos_TE[[position]], place.sin_TE[[position]])[:, 0].bfloat16().float()
    )
    keys, values = cache[:, :, :, position - 89 : position + 1].float()
    want = F.scaled_dot_product_attention(q_MHE[:, :, None], keys, values, enable_gqa=True)
    assert float((out.x_MK.float() - want[:, :, 0].flatten(1)).abs().max()) < 2**-8


@pytest.mark.parametrize(
    ("family", "layers", "rows", "changes"),
    [
        ("qwen2", 1, 2, {}),
        ("qwen3", 2, 1, {}),
        ("llama", 1, 1, {"attention_bias": True, "mlp_bias": True}),
        ("mistral", 1, 1, {"sliding_window": 2}),
    ],
)
def test_a_step_is_as_near_to_float32_as_the_decoder(
    family: str, layers: int, rows: int, changes: dict[str, Any]
) -> None:
    """Logits of consecutive tokens; what rounds more often than the step may not be nearer to float32."""
    model = tiny(family, num_hidden_layers=layers, **changes)
    exact = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
    config = DecoderConfig.from_hf(model.config.to_dict())
    wide = load_decoder(config, StateDict(exact, fused=True))
    decoder = load_decoder(config, StateDict(exact, fused=True), dtype=torch.bfloat16)
    ids, errors = tokens(rows, 5), []
    caches = [wide.cache(rows, 5), decoder.cache(rows, 5), decoder.cache(rows, 5)]
    step = open_step(decoder, caches[2])
    for i in range(5):
        part = i == 1  # of a prompt, between two steps
        got = decoder.prefill(ids[:, [i]], caches[2]) if part else read(step, ids[:, i]).clone()
        want = wide.decode(ids[:, i], caches[0])
        plain = decoder.decode(ids[:, i], caches[1])
        assert float((got - want).abs().max()) < 0.05 * float(want.abs().max())
        errors.append([float((y - want).square().mean().sqrt()) for y in (got, plain)])
    ours, theirs = torch.tensor(errors).mean(0)
    assert 0 < ours < 1.2 * theirs
    with pytest.raises(QConvertError, match=r"5 \+ 1 tokens"):
        read(step, ids[:, 0])


@pytest.mark.parametrize(
    ("tokens", "vocab", "widths"), [(5, 700, (48, 48)), (140, 300, (64, 96)), (130, 256, (128, 128))]
)
def test_scores(tokens: int, vocab: int, widths: tuple[int, int]) -> None:
    """One model, another that is far from it, and the first again, whose divergence is nothing."""
    models = [
        HiddenStates(
            normal(tokens, width, seed=i).bfloat16(), (normal(vocab, width, seed=2 + i) * 0.4).bfloat16()
        )
        for i, width in enumerate(widths)
    ]
    targets = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(0))
    for group in (models[:1], models, [models[0], models[0]]):
        for got, want in zip(
            score_hidden_states(group, targets), score_reference(group, targets), strict=True
        ):
            assert torch.allclose(got.nll_N, want.nll_N, rtol=2e-6, atol=2e-6)
            assert torch.equal(got.top_N, want.top_N)
            assert (got.kl_N is None) == (want.kl_N is None)
            if got.kl_N is not None and want.kl_N is not None:
                assert torch.allclose(got.kl_N, want.kl_N, rtol=2e-6, atol=2e-6)


class Grids:
    """A model's weights, its matrices replaced by random grids of 4 or 8 bits; q and k apart from v."""

    def __init__(self, model: Any, encoding: AffineInt, head: bool) -> None:
        exact = {name: weight.bfloat16().float() for name, weight in model.state_dict().items()}
        self.plain, self.encoding, self.head = StateDict(exact, fused=False), encoding, head

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        if self.head and role == "lm_head":
            return None
        value = self.plain.get(role, layer, kind)
        inside = role.startswith(("attn.", "mlp.")) and "norm" not in role
        if value is None or kind != "weight" or not (inside or (self.head and role == "embed")):
            return value
        return random_value(self.encoding, value.rows, value.width)


@pytest.mark.parametrize(
    ("encoding", "tied", "head_bits"),
    [
        (AffineInt(4, 32, False, DType.BF16), True, None),
        (AffineInt(8, None, True, DType.F32), False, 8),
        (AffineInt(4, 64, True, DType.F16), False, 4),
    ],
)
def test_a_step_with_quantized_weights(encoding: AffineInt, tied: bool, head_bits: int | None) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
    model = tiny("qwen2", tie_word_embeddings=tied, **sizes)
    config = DecoderConfig.from_hf(model.config.to_dict())
    wide, decoder = (
        load_decoder(config, Grids(model, encoding, tied), dtype=dtype, layout=layout, head_bits=head_bits)
        for dtype, layout in ((torch.float32, Layout.REFERENCE), (torch.bfloat16, Layout.AUTO))
    )
    (qkv,) = decoder.layers[0].attention.qkv
    assert isinstance(qkv.weight, MmaWeight) and qkv.weight.bits == encoding.bits
    assert isinstance(decoder.head, IntWeight)
    caches = [wide.cache(2, 4), decoder.cache(2, 4)]
    step = open_step(decoder, caches[1])
    for ids in tokens(2, 3).T:
        want, got = wide.decode(ids, caches[0]), read(step, ids)
        assert float((got - want).abs().max()) < 0.03 * float(want.abs().max())


def test_a_decoder_laid_out_for_speed_steps() -> None:
    """From one cache to the next and back, each filled by a prompt first."""
    model = tiny("llama", num_hidden_layers=1)
    config, weights = DecoderConfig.from_hf(model.config.to_dict()), StateDict(model.state_dict(), fused=True)
    decoder = load_decoder(config, weights, dtype=torch.bfloat16, layout=Layout.AUTO)
    plain = replace(decoder, step=None)
    assert isinstance(decoder.step, CudaStep)
    both = [[each.cache(1, 8) for _ in range(2)] for each in (decoder, plain)]
    for caches, each in zip(both, (decoder, plain), strict=True):
        for i, cache in enumerate(caches):
            each.prefill(tokens(1, 3, seed=i), cache)
    for turn in (0, 1, 0):
        got, want = (
            each.decode(torch.tensor([7]), caches[turn])
            for each, caches in zip((decoder, plain), both, strict=True)
        )
        assert got.shape == want.shape and float((got - want).abs().max()) < 0.03 * float(want.abs().max())
    assert [cache.length for cache in both[0]] == [5, 4]


def test_greedy_steps_choose_what_reading_would() -> None:
    decoder = decoder_of(tiny("qwen3", num_hidden_layers=1), fused=True, dtype=torch.bfloat16)
    step = open_step(decoder, decoder.cache(1, 8), greedy=True)
    chosen = read_greedily(step, torch.tensor([7]), 3)
    plain, token, wanted = open_step(decoder, decoder.cache(1, 8)), torch.tensor([7]), []
    for _ in range(3):
        token = read(plain, token).argmax(-1)
        wanted.append(int(token))
    assert chosen[:, 0].tolist() == wanted and len(set(wanted)) > 1


def test_what_cannot_step_says_why() -> None:
    bf16 = torch.bfloat16
    dense = tiny("qwen2", num_hidden_layers=1)
    assert obstacle(decoder_of(dense, fused=True, dtype=bf16), 16) is None
    for decoder, rows, why in (
        (decoder_of(dense, fused=True), 1, "float32"),
        (decoder_of(dense, fused=True, dtype=bf16), 17, "17 sequences are more than 16"),
        (decoder_of(dense, dtype=bf16), 1, "apart"),
        (decoder_of(tiny("qwen3_moe"), fused=True, dtype=bf16), 1, "experts"),
    ):
        assert why in str(obstacle(decoder, rows))
