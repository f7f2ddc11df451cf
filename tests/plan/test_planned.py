"""What a plan would cost is what its files cost, measured before they are written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import Checkpoint, open_checkpoint
from qconvert.convert.execute import execute, open_model, prepare
from qconvert.convert.job import RunOptions
from qconvert.core.schemes import parse_scheme
from qconvert.evaluate.planned import planned_divergences
from qconvert.plan.recipe import Recipe, Rule
from qconvert.plan.request import GGUFTarget, Request
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.load import load_decoder
from tests.support.decoder_models import tokens
from tests.support.gguf_models import save_transformers_model

TEXT = tokens(3, 24, vocab=96)
SIZES = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
RULES = (Rule("layers.1.mlp.down", parse_scheme("int4-g32")), Rule("attn.o", None))
REQUESTS = {
    "folder": Request("quantize", Recipe(scheme=parse_scheme("int3-g32"), rules=RULES)),
    "fused": Request("quantize", Recipe(scheme=parse_scheme("int3-g32"), fuse=("qkv",))),
    "file.gguf": Request("to-gguf", Recipe(), target=GGUFTarget("Q4_0", pure=True)),
}


def log_probabilities(checkpoint: Checkpoint) -> torch.Tensor:
    """Of every position of the text, in float64."""
    decoder = load_decoder(DecoderConfig.of(checkpoint.architecture), CheckpointWeights(checkpoint))
    with torch.no_grad():
        outputs = decoder.outputs(decoder.hidden(TEXT)[:, :-1].flatten(0, 1))
        return outputs.logits(0, decoder.config.vocab).double().log_softmax(-1)


@pytest.mark.parametrize("family", ["Llama", "Phi3"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_plan_costs_what_its_files_cost(name: str, family: str, tmp_path: Path) -> None:
    more = {"pad_token_id": 0} if family == "Phi3" else {}
    save_transformers_model(tmp_path / "model", family, SIZES | HEADS | more)
    source = open_model(str(tmp_path / "model"))
    job = prepare(source, REQUESTS[name], RunOptions(jobs=2))
    found = [kl_N.mean() for kl_N in planned_divergences([job, job], TEXT.numpy())]
    execute(job, tmp_path / name)
    before, after = (
        log_probabilities(each) for each in (source.checkpoint, open_checkpoint(tmp_path / name))
    )
    want = float((before.exp() * (before - after)).sum(-1).mean())
    np.testing.assert_allclose(found, want, rtol=2e-3)
    assert want > 1e-6
