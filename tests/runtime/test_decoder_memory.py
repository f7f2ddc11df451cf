"""A packed model holds its packed weights and, while it computes, one bounded block of decoded ones."""

from __future__ import annotations

import weakref
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from qconvert.runtime import storage
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from tests.runtime.test_decoder_model import Quantized
from tests.support.decoder_models import StateDict, tiny, tokens

HIDDEN, INNER, LAYERS, VOCAB = 256, 512, 4, 160
SCRATCH = 1 << 16
KV = 2 * 32
WEIGHTS = LAYERS * ((HIDDEN + 2 * KV) * HIDDEN + HIDDEN * HIDDEN + 3 * INNER * HIDDEN)
TABLES = 2 * VOCAB * HIDDEN
PACKED = (Layout.REFERENCE, Layout.AUTO)  # the third holds dense copies, and says so


class Allocations(TorchDispatchMode):
    """Bytes of the tensors that are made inside and still alive, and the most there were at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if torch.is_tensor(made) and made.untyped_storage().data_ptr() not in given:
                self.count(made.untyped_storage())
        return out

    def count(self, storage: torch.UntypedStorage) -> None:
        if id(storage) in self.seen:
            return
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        self.seen.add(id(storage))
        weakref.finalize(storage, self.forget, id(storage), size)

    def forget(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def held(thing: object, found: dict[int, int] | None = None) -> int:
    """Bytes of all tensors and arrays that an object leads to, each memory once."""
    found = {} if found is None else found
    if isinstance(thing, torch.Tensor):
        found[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    elif isinstance(thing, np.ndarray):
        found[thing.ctypes.data] = thing.nbytes
    elif isinstance(thing, list | tuple):
        for part in thing:
            held(part, found)
    elif isinstance(thing, dict):
        held(list(thing.values()), found)
    elif is_dataclass(thing):
        held([getattr(thing, field.name) for field in fields(thing)], found)
    elif type(thing).__module__.startswith("qconvert") and hasattr(thing, "__dict__"):
        held(list(vars(thing).values()), found)
    return sum(found.values())


def decoders(layout: Layout) -> tuple[Decoder, Decoder]:
    """A dense decoder, and the same quantized to int4 in groups of 32."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS}
    model = tiny("qwen2", **sizes, num_attention_heads=8, head_dim=32, vocab_size=VOCAB)
    config = DecoderConfig.from_hf(model.config.to_dict())
    dense = load_decoder(config, StateDict(model.state_dict()))
    return dense, load_decoder(config, Quantized(model.state_dict(), group=32), layout=layout)


@pytest.mark.parametrize("layout", PACKED)
def test_a_packed_model_holds_its_packed_weights(layout: Layout) -> None:
    """Four bits and a float32 scale per 32 weights; norms, biases and buffers are the rest."""
    dense, packed = decoders(layout)
    want = (WEIGHTS + TABLES) * (4 + 32 / 32) / 8
    assert want <= held(packed) < 1.1 * want
    assert held(dense) > 4 * (WEIGHTS + TABLES)


@pytest.mark.parametrize("rows", [1, 60])
@pytest.mark.parametrize("layout", PACKED)
def test_reading_needs_one_block_more_than_a_dense_model(
    layout: Layout, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "SCRATCH_BYTES", SCRATCH)
    dense, packed = decoders(layout)
    most = []
    for decoder in (dense, packed):
        with Allocations() as allocations:
            decoder.hidden(tokens(1, rows, vocab=VOCAB))
        most.append(allocations.most)
    # A block in float32, and what decoding it may have beside it.
    assert most[1] <= most[0] + 3 * SCRATCH
    assert 3 * SCRATCH < 4 * 2 * INNER * HIDDEN / 2  # half of the largest weight of a layer


def test_the_tracker_sees_a_weight_that_is_decoded_whole() -> None:
    _, packed = decoders(Layout.AUTO)
    with Allocations() as allocations:
        weights = [layer.mlp.gate_up[0].weight.rows(slice(None)) for layer in packed.layers]  # type: ignore[union-attr]
    assert allocations.most >= sum(w.nbytes for w in weights) == LAYERS * 4 * 2 * INNER * HIDDEN
