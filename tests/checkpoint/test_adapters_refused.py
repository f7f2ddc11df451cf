"""What cannot be merged is refused by its name, and nothing is written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.support.adapters import PREFIX, lora_arrays, write_peft
from tests.support.commands import qconvert
from tests.support.models import tiny

MODULES = {"model.layers.0.self_attn.q_proj": (256, 256), "model.layers.1.mlp.down_proj": (256, 384)}


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tiny(tmp_path_factory.mktemp("base") / "base", dtype="f32")
    return write_peft(base.parent / "my-lora", lora_arrays(MODULES, 4), base)


def _config(**keys: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))

    return change


def _arrays(make: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        save_file(make(load_file(path)), path)

    return change


Q = f"{PREFIX}model.layers.0.self_attn.q_proj"
TOKENS = f"{PREFIX}model.embed_tokens.token_adapter.trainable_tokens_delta"
WRONG = {
    "another method": (_config(peft_type="LOHA"), "peft_type is LOHA, not LORA"),
    "a changed base": (_config(init_lora_weights="pissa_niter_4"), "which changes the base"),
    "replicated layers": (_config(layer_replication=[[0, 2]]), "layer_replication is not known here"),
    "a pattern that takes long": (_config(alpha_pattern={".*.*.*x": 1}), "more than names of modules"),
    "DoRA of an embedding": (
        _arrays(
            lambda a: (
                a
                | {
                    f"{PREFIX}model.embed_tokens.lora_embedding_A": np.zeros((4, 320), np.float32),
                    f"{PREFIX}model.embed_tokens.lora_embedding_B": np.zeros((256, 4), np.float32),
                    f"{PREFIX}model.embed_tokens.lora_magnitude_vector": np.ones(256, np.float32),
                }
            )
        ),
        "DoRA of an embedding, with 256 lengths of columns, is not known here",
    ),
    "stacks of experts": (
        _arrays(
            lambda a: (
                a
                | {
                    f"{PREFIX}model.layers.0.mlp.experts.lora_A.weight": np.zeros((8, 256), np.float32),
                    f"{PREFIX}model.layers.0.mlp.experts.lora_B.weight": np.zeros((256, 8), np.float32),
                }
            )
        ),
        "has no matrices of single experts there",
    ),
    "a pattern that is code": (_config(alpha_pattern={"(a+)+$": 1}), "more than names of modules"),
    "no rank": (_config(r=True), "r is True, not a rank"),
    "no factor": (_config(lora_alpha="8"), "lora_alpha is 8, not a number"),
    "a base that is no text": (_config(base_model_name_or_path=[1]), "not a text"),
    "no base": (_config(base_model_name_or_path=None), "names no base"),
    "a base on a server": (
        _config(base_model_name_or_path="https://x.test/m"),
        "its base is at https://x.test/m",
    ),
    "tokens without their numbers": (
        _arrays(lambda a: a | {TOKENS: np.zeros((2, 256), np.float32)}),
        "f32 [2, 256] for 0 tokens",
    ),
    "a token that is none": (
        lambda folder: (
            _config(trainable_token_indices=[1, 320])(folder),
            _arrays(lambda a: a | {TOKENS: np.zeros((2, 256), np.float32)})(folder),
        )[0],
        "has row 320 of 256 numbers",
    ),
    "half a product": (
        _arrays(lambda a: {k: v for k, v in a.items() if k != f"{Q}.lora_B.weight"}),
        "has 1 of its two matrices",
    ),
    "two ranks": (
        _arrays(lambda a: a | {f"{Q}.lora_B.weight": np.zeros((256, 5), np.float32)}),
        "matrices of ranks 5 and 4",
    ),
    "another width": (
        _arrays(lambda a: a | {f"{Q}.lora_A.weight": np.zeros((4, 128), np.float32)}),
        "changes a matrix of [256, 128], the base's is [256, 256]",
    ),
    "another model": (
        _arrays(lambda a: {k.replace("layers.1", "layers.9"): v for k, v in a.items()}),
        "has no such tensor",
    ),
    "convolutions": (
        _arrays(lambda a: a | {f"{Q}.lora_A.weight": np.zeros((4, 256, 1), np.float32)}),
        "not those of matrices",
    ),
    "integers": (
        _arrays(lambda a: a | {f"{Q}.lora_A.weight": np.zeros((4, 256), np.int32)}),
        "i32, not a float",
    ),
    "what no version of it has": (
        _arrays(lambda a: a | {f"{Q}.lora_E.weight": np.zeros((4, 256), np.float32)}),
        "an array of an adapter that is not known here",
    ),
    "no file": (
        lambda folder: (folder / "adapter_model.safetensors").unlink(),
        "but no adapter_model.safetensors",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_merged_is_refused_by_its_name(adapter: Path, tmp_path: Path, case: str) -> None:
    change, said = WRONG[case]
    folder = tmp_path / "lora"
    shutil.copytree(adapter, folder)
    change(folder)
    ran = qconvert("quantize", folder, "--bits", "4", "-o", tmp_path / "out")
    assert ran.code == 1 and said in ran.err and "Hint: " in ran.err, ran.err
    assert not (tmp_path / "out").exists() and "Traceback" not in ran.err
