"""Runs one decode step: the next token of every sequence through a dense model, nine launches a layer.

The launches of a layer: norm (with the residual and the sum of the product before it), qkv, attend
(with bias, head norms, rotation and the cache), combine, o, norm, gate_up, swiglu, down. All buffers
are made once and the position and the tokens live on the device, so that on CUDA the whole step is
one captured graph; elsewhere, as in triton's interpreter, the same launches follow one another.

Dense models only, in bfloat16: which tokens an expert gets is known on the device alone, and a graph
holds one set of launches, so a mixture of experts runs in the generic `Decoder`; `obstacle` says so.
Legend: M sequences, D hidden, V vocabulary, K in features, N out features, S parts of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qconvert.errors import QConvertError
from qconvert.runtime.cache import Cache
from qconvert.runtime.cuda.activation import Parts, Rows, empty_rows
from qconvert.runtime.cuda.attention import (
    HeadNorms,
    HeadShape,
    Place,
    Softmaxes,
    attend,
    combine,
    empty_softmaxes,
    stretches_for,
)
from qconvert.runtime.cuda.matmul import multiply_partials
from qconvert.runtime.cuda.norm import add_norm
from qconvert.runtime.cuda.packing import FewRowWeight, MmaWeight, mma_table, tile_group
from qconvert.runtime.cuda.swiglu import swiglu
from qconvert.runtime.cuda.triton_language import available
from qconvert.runtime.cuda.tuning import FEW_ROWS, splits
from qconvert.runtime.layer import Attention, Layer, Mlp
from qconvert.runtime.linear import Linear, Table, Weight
from qconvert.runtime.model import Decoder
from qconvert.runtime.norm import Norm
from qconvert.runtime.rope import cos_sin
from qconvert.runtime.storage import DenseWeight, EncodedWeight, IntWeight


@dataclass(frozen=True, slots=True)
class Product:
    """A weight, the rows it is multiplied by, and where the parts of the product go."""

    weight: FewRowWeight
    rows: Rows
    out: Parts

    def multiply(self) -> None:
        parts_SMN = self.out.parts_SMN
        multiply_partials(self.rows.x_MK, self.rows.sums_GM, self.weight, len(parts_SMN), parts_SMN)


@dataclass(slots=True)
class Step:
    """A model bound to a cache and to its buffers. `position` is what the device's position holds.

    `token_M` int64 are the tokens read next; the logits of what follows come in `logits_MV`, float32. With
    `greedy`, the likeliest of them replaces `token_M` at the end of a step. `launches` are bound to their
    buffers and to their layers' parts of the cache.
    """

    decoder: Decoder
    cache: Cache
    greedy: bool
    token_M: Tensor
    place: Place
    residual_MD: Tensor
    logits_MV: Tensor
    launches: Sequence[Callable[[], None]]
    position: int = -1
    graph: torch.cuda.CUDAGraph | None = None


def obstacle(decoder: Decoder, rows: int) -> str | None:
    """Why this decoder cannot step `rows` sequences at a time here; None when it can."""
    checks = (
        (available(decoder.device), "there is no triton, or no GPU that computes in bfloat16"),
        (decoder.dtype == torch.bfloat16, f"it computes in {decoder.dtype}"),
        (rows <= FEW_ROWS, f"{rows} sequences are more than {FEW_ROWS}"),
        (decoder.config.experts is None, "it has experts"),
        (decoder.is_plain, f"the kernels do not compute all of {decoder.config.model_type}"),
        (not isinstance(decoder.embed, EncodedWeight), "its embedding is decoded in main memory"),
        (_is_packable(decoder.head), "its head is in a form that no kernel multiplies by"),
        (
            all(map(_has_kernels, decoder.layers)),
            "it has weights that no kernel multiplies by, or that are stored apart",
        ),
    )
    return next((reason for fine, reason in checks if not fine), None)


def _has_kernels(layer: Layer) -> bool:
    if not isinstance(layer.mlp, Mlp) or not len(layer.plain_attention.qkv) == len(layer.mlp.gate_up) == 1:
        return False
    return all(isinstance(linear.weight, FewRowWeight) for linear in _linears(layer))


def _is_packable(head: Table) -> bool:
    if isinstance(head, IntWeight):
        return tile_group(head.width, head.scales_OG.shape[1]) != 0
    return isinstance(head, DenseWeight) and head.w_OI.dtype == torch.bfloat16


def _linears(layer: Layer) -> list[Linear]:
    assert isinstance(layer.mlp, Mlp)
    return [*layer.plain_attention.qkv, layer.plain_attention.o, *layer.mlp.gate_up, layer.mlp.down]


@dataclass(slots=True)
class CudaStep:
    """Reads one token of one sequence: `step(token, cache)` gives the logits, float32 [V].

    Buffers, and the graph on CUDA, are made for a cache when it is first seen, and for one at a time.
    """

    decoder: Decoder
    step: Step | None = None

    def __call__(self, token: int, cache: Cache) -> Tensor:
        """Logits of what follows the token; the cache then holds it."""
        if self.step is None or self.step.cache is not cache:
            self.step = None
            self.step = open_step(self.decoder, cache)
        return read(self.step, torch.tensor([token]))[0].clone()


@torch.inference_mode()
def open_step(decoder: Decoder, cache: Cache, *, greedy: bool = False) -> Step:
    """Buffers for stepping all sequences of the cache, and on CUDA the captured graph.

    The cache keeps what it holds, and may be filled further or emptied between steps.
    """
    reason = obstacle(decoder, cache.kv.shape[2])
    assert reason is None, reason
    step = _bind(decoder, cache, greedy)
    if decoder.device.type == "cuda":
        _capture(step)
    return step


@torch.inference_mode()
def read(step: Step, token_M: Tensor) -> Tensor:
    """Read one more token of each sequence; logits of what follows, float32 [M, V].

    The logits are the step's own buffer.
    """
    step.token_M.copy_(token_M)
    _advance(step)
    return step.logits_MV


@torch.inference_mode()
def read_greedily(step: Step, token_M: Tensor, count: int) -> Tensor:
    """Read a token of each sequence and `count - 1` likeliest ones after it; int64 [count, M].

    The tokens chosen; nothing waits for the device in between. For a step opened as `greedy`.
    """
    assert step.greedy
    chosen_NM = torch.empty(count, len(token_M), dtype=torch.int64, device=step.token_M.device)
    step.token_M.copy_(token_M)
    for chosen_M in chosen_NM:
        _advance(step)
        chosen_M.copy_(step.token_M)
    return chosen_NM


def _advance(step: Step) -> None:
    """One step from where the cache ends."""
    cache = step.cache
    if cache.length >= cache.kv.shape[-2]:
        raise QConvertError(
            f"prompt: {cache.length} + 1 tokens do not fit the cache of {cache.kv.shape[-2]}",
            "ask for a longer cache or a shorter prompt",
        )
    if step.position != cache.length:
        step.place.position_1.fill_(cache.length)
    if step.graph is None:
        _launch(step)
    else:
        step.graph.replay()
    cache.length += 1
    step.position = cache.length


def _capture(step: Step) -> None:
    """Record the launches of a step. The first run compiles kernels, which capturing does not allow.

    Both runs only write what the first real step overwrites.
    """
    step.place.position_1.fill_(min(step.cache.length, step.cache.kv.shape[-2] - 1))
    side = torch.cuda.Stream(step.decoder.device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(step.decoder.device))
    with torch.cuda.stream(side):
        _launch(step)
    torch.cuda.current_stream(step.decoder.device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _launch(step)
    step.graph, step.position = graph, -1


def _launch(step: Step) -> None:
    """All launches of a step, in order."""
    step.residual_MD.copy_(step.decoder.embed.rows(step.token_M))
    for launch in step.launches:
        launch()
    step.place.position_1.add_(1)
    if step.greedy:
        torch.argmax(step.logits_MV, dim=-1, out=step.token_M)


def _bind(decoder: Decoder, cache: Cache, greedy: bool) -> Step:
    rows, room = cache.kv.shape[2], cache.kv.shape[-2]
    config, device = decoder.config, decoder.device
    shape = _head_shape(decoder.layers[0].plain_attention)
    processors = 4  # few where programs run one after the other
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    softmaxes = empty_softmaxes(rows, shape, stretches_for(shape, rows, processors), device)
    position_1 = torch.zeros(1, dtype=torch.int64, device=device)
    place = Place(position_1, *cos_sin(config.rope, decoder.frequencies_F, 0, room))
    residual_MD = torch.empty(rows, config.hidden, device=device)
    # Packed again where the decoder has it in rows, for whole prompts.
    weight = mma_table(decoder.head) if isinstance(decoder.head, IntWeight) else decoder.head
    head = _product(weight, None, rows, device, parts=1)
    launches, added = list[Callable[[], None]](), None
    for layer in decoder.layers:
        added = _bind_layer(layer, added, residual_MD, place, cache, softmaxes, launches)
    launches += [_bind_norm(decoder.norm, added, residual_MD, head.rows), head.multiply]
    token_M = torch.zeros(rows, dtype=torch.int64, device=device)
    logits_MV = head.out.parts_SMN[0]
    return Step(decoder, cache, greedy, token_M, place, residual_MD, logits_MV, launches)


def _bind_layer(
    layer: Layer,
    added: Parts | None,
    residual_MD: Tensor,
    place: Place,
    cache: Cache,
    softmaxes: Softmaxes,
    launches: list[Callable[[], None]],
) -> Parts:
    """Append the launches of a layer; takes and returns what is to be added to the residual first."""
    attention, rows, device = layer.plain_attention, len(residual_MD), cache.kv.device
    q_norm, k_norm = attention.q_norm, attention.k_norm
    norms = HeadNorms(_weight(q_norm), _weight(k_norm), q_norm.eps) if q_norm and k_norm else None
    cache_2MKTE = cache.kv[attention.layer]
    qkv, o, gate_up, down = (
        _product(linear.weight, linear.bias_O, rows, device) for linear in _linears(layer)
    )
    launches += [
        _bind_norm(layer.attention_norm, added, residual_MD, qkv.rows),
        qkv.multiply,
        partial(attend, qkv.out, norms, _head_shape(attention), place, cache_2MKTE, softmaxes),
        partial(combine, softmaxes, o.rows),
        o.multiply,
        _bind_norm(layer.mlp_norm, o.out, residual_MD, gate_up.rows),
        gate_up.multiply,
        partial(swiglu, gate_up.out, down.rows),
        down.multiply,
    ]
    return down.out


def _bind_norm(norm: Norm | None, added: Parts | None, residual_MD: Tensor, out: Rows) -> Callable[[], None]:
    assert norm is not None
    return partial(add_norm, added, residual_MD, _weight(norm), norm.eps, out)


def _weight(norm: Norm) -> Tensor:
    assert norm.weight is not None
    return norm.weight


def _head_shape(attention: Attention) -> HeadShape:
    return HeadShape(attention.heads, attention.kv_heads, attention.head_dim, attention.window)


def _product(
    weight: Weight | None, bias_O: Tensor | None, rows: int, device: torch.device, parts: int | None = None
) -> Product:
    assert isinstance(weight, FewRowWeight)
    out, width = weight.shape
    group = weight.sum_group if isinstance(weight, MmaWeight) else None
    parts_SMN = torch.empty(parts or splits(weight.kind, weight.shape), rows, out, device=device)
    return Product(weight, empty_rows(rows, width, group or 0, device), Parts(parts_SMN, bias_O))
