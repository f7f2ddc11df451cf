"""`from-gguf` of every family: what was written comes back, and transformers computes the same with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.commands import qconvert
from tests.gguf_families import random_model
from tests.gguf_models import SIZES, save_transformers_model, transformers_logits
from tests.models import stored
from tests.test_from_gguf import run
from tests.test_gguf_families import CONFIGS, IDS
from tests.test_gguf_mixtures import CASES

# Norms of Gemma's are one more in a file, and float32 has no room for all bits of that sum.
IN_BF16 = (*CASES, "gemma", "gemma2", "gemma3")


def source_of(folder: Path, name: str) -> Path:
    """A random model; in float32, or in bf16 for those of `IN_BF16`."""
    if name in CASES:
        family, changes = CASES[name]
        return random_model(folder / "model", family, **changes)
    class_name, sizes = CONFIGS[name]
    config = {**({} if "n_embd" in sizes else SIZES), **sizes}
    dtype = "bfloat16" if name in IN_BF16 else "float32"
    return save_transformers_model(folder / "model", class_name, config, dtype, spread=0.08)


@pytest.mark.parametrize("name", [*CONFIGS, *CASES])
def test_there_and_back_gives_the_same_bytes(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    source = source_of(tmp_path, name)
    dtype = "bf16" if name in IN_BF16 else "f32"
    gguf = run("to-gguf", source, "--type", dtype, "-o", tmp_path / "m.gguf")
    back = run("from-gguf", gguf, "-o", tmp_path / "back", "--dtype", dtype)
    ran = qconvert("diff", back, source, "--exit-code")
    assert ran.code == 0, ran.out
    ours, theirs = stored(back), stored(source)
    if name == "qwen2-moe-tied":  # whose head llama.cpp wants in the file
        assert ours.pop("lm_head.weight") == ours["model.embed_tokens.weight"]
    if name != "qwen3.5-moe":  # which is published with stacks, and saved without them
        assert ours == theirs
    assert np.array_equal(transformers_logits(back, IDS), transformers_logits(source, IDS))
