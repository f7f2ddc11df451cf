"""Weights of a decoder lie side by side in large pages, what they are multiplied by at cache lines."""

from __future__ import annotations

import mmap
import re
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qconvert.core.dtypes import DType
from qconvert.core.large_pages import in_large_pages
from qconvert.core.values import DenseRows
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.cpu import decode_step, weight_memory
from qconvert.runtime.cpu.packed_weights import PackedGrid
from qconvert.runtime.cpu.simd import LINE, line_in
from qconvert.runtime.cpu.weight_memory import WeightMemory, one_by_one
from qconvert.runtime.device_layout import Layout, place_weight
from qconvert.runtime.load import load_decoder
from qconvert.runtime.storage import DenseWeight
from tests.runtime.test_decoder_model import Quantized
from tests.support.decoder_models import StateDict, tiny

CPU, BF16 = torch.device("cpu"), torch.bfloat16
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux is asked for large pages")


def test_tensors_lie_apart_and_begin_at_cache_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "_CHUNK", 4096)
    memory, made = WeightMemory(), []
    for number, (count, dtype) in enumerate(
        [(3, torch.uint8), (500, torch.float32), (0, torch.int8), (2000, BF16), (5000, torch.int8), (1, BF16)]
    ):
        made.append(memory(count, dtype).fill_(number))
        assert made[-1].shape == (count,) and made[-1].dtype == dtype
        assert count == 0 or made[-1].data_ptr() % 64 == 0
        assert made[-1].untyped_storage().nbytes() == made[-1].nbytes
    assert all(bool((each == number).all()) for number, each in enumerate(made))


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[mmap.mmap]]:
    """The memory that is taken, as long as something holds it."""
    taken: list[weakref.ref[mmap.mmap]] = []

    def watched(nbytes: int) -> mmap.mmap:
        found = in_large_pages(nbytes)
        taken.append(weakref.ref(found))
        return found

    monkeypatch.setattr(weight_memory, "in_large_pages", watched)
    return taken


@linux
def test_a_chunk_is_given_back_with_the_last_tensor_in_it(chunks: list[weakref.ref[mmap.mmap]]) -> None:
    memory = WeightMemory()
    first, second = memory(100, torch.uint8), memory(100, torch.uint8)
    large = memory(weight_memory._CHUNK, torch.uint8)
    del memory, first
    assert len(chunks) == 2 and all(chunk() is not None for chunk in chunks)
    del large
    assert chunks[0]() is not None and chunks[1]() is None
    del second
    assert chunks[0]() is None


def flags_at(address: int) -> set[str]:
    """What Linux says of the mapping that an address lies in."""
    within = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            within = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif within and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


@linux
@pytest.mark.parametrize("kind", ["int4-cpu", "dense"])
def test_weights_of_a_decoder_lie_in_it(chunks: list[weakref.ref[mmap.mmap]], kind: str) -> None:
    """But not those of layers that come and go."""
    model = tiny("qwen3", hidden_size=64, intermediate_size=128)
    config, state = DecoderConfig.from_hf(model.config.to_dict()), model.state_dict()
    weights = Quantized(state, group=32) if kind == "int4-cpu" else StateDict(state)
    for on_demand in (True, False):
        decoder = load_decoder(config, weights, layout=Layout.AUTO, dtype=BF16, on_demand=on_demand)
        weight: Any = decoder.layers[0].mlp.down.weight  # type: ignore[union-attr]
        assert weight.kind == kind and len(chunks) == (not on_demand)
        numbers = weight.codes_OB if isinstance(weight, PackedGrid) else weight.w_OI
    chunk = chunks[0]()
    assert chunk is not None
    starts = np.frombuffer(chunk, np.uint8).ctypes.data
    assert starts <= numbers.data_ptr() < starts + len(chunk)


@linux
def test_the_system_is_asked_for_large_pages() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage").is_dir():
        pytest.skip("this Linux has none")
    assert "hg" in flags_at(WeightMemory()(1 << 20, torch.uint8).data_ptr())


def test_what_kernels_read_again_and_again_begins_at_cache_lines() -> None:
    """Vectors of the decode step and of its threads, and what rows are multiplied by."""
    for size in (1, 16, 17, 100):
        rows = decode_step._zeros(3, size)
        assert rows.shape == (3, size) and not rows.any()
        assert all(row.ctypes.data % LINE == 0 for row in rows)
    raw = np.zeros(4 * LINE, np.int8)
    for start in range(LINE):
        begins = line_in(raw[start:])
        assert begins % LINE == 0 and 0 <= begins - raw[start:].ctypes.data < LINE


def test_what_is_large_by_itself_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    value = DenseRows(torch.zeros(8, 64, dtype=torch.int16).numpy().view(np.uint16), DType.BF16)
    for limit, copied in ((1 << 10, False), (1 << 11, True)):
        monkeypatch.setattr("qconvert.runtime.device_layout.LARGE_BY_ITSELF", limit)
        for allocate in (WeightMemory(), one_by_one):
            weight = place_weight(value, CPU, BF16, Layout.AUTO, allocate)
            assert isinstance(weight, DenseWeight)
            same = weight.w_OI.data_ptr() == value.rows_RI.ctypes.data
            assert same is not (copied and allocate is not one_by_one)
