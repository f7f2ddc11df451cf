"""The decoder against transformers in float32, on random models of every family and on trained ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers

from qconvert.checkpoint.by_role import CheckpointWeights
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.core.encodings import AffineInt
from qconvert.core.values import AffineIntRows, DenseRows, Value
from qconvert.errors import CorruptCheckpoint, QConvertError
from qconvert.runtime.config import DecoderConfig
from qconvert.runtime.device_layout import Layout, place_rows
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from qconvert.runtime.weight_source import Weights
from tests.support.decoder_models import StateDict, decoder_of, tiny, tokens

TOLERANCE = 1e-4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0, "original_max_position_embeddings": 32}
SHARED = {"shared_expert_intermediate_size": 20}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-mha-biases-tied": (
        "llama",
        {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3-rope": ("llama", {"head_dim": 16, "rope_parameters": LLAMA3}),
    "llama-linear-rope": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 5, "head_dim": 12}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen2-yarn-tied": ("qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-biases-tied": ("qwen3", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen2-moe": ("qwen2_moe", SHARED),
    "qwen2-moe-window": (
        "qwen2_moe",
        SHARED
        | {"norm_topk_prob": True, "decoder_sparse_step": 2, "mlp_only_layers": []}
        | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2},
    ),
    "qwen3-moe": ("qwen3_moe", {"norm_topk_prob": True, "head_dim": 16}),
    "qwen3-moe-window": ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 4}),
}


def in_pieces(decoder: Decoder, ids_BT: torch.Tensor) -> torch.Tensor:
    """Logits at every position, through the cache: 7 tokens, then 9, then one by one."""
    cache = decoder.cache(*ids_BT.shape)
    pieces = [*ids_BT[:, :16].split([7, 9], dim=1), *ids_BT[:, 16:].split(1, dim=1)]
    return torch.cat([decoder.logits(decoder.hidden(piece, cache)) for piece in pieces], dim=1)


@pytest.mark.parametrize("case", CASES)
def test_matches_transformers(case: str) -> None:
    model_type, changes = CASES[case]
    model, ids = tiny(model_type, **changes), tokens(2, 24)
    with torch.no_grad():
        want = model(ids).logits
    for fused in (False, True):
        decoder = decoder_of(model, fused=fused)
        assert (decoder.logits(decoder.hidden(ids)) - want).abs().max() < TOLERANCE
        assert (in_pieces(decoder, ids) - want).abs().max() < TOLERANCE


def test_bfloat16_is_as_close_to_float32_as_transformers_in_bfloat16() -> None:
    model, ids = tiny("qwen3", head_dim=16), tokens(2, 24)
    decoder = decoder_of(model, dtype=torch.bfloat16)
    with torch.no_grad():
        want = model(ids).logits
        theirs = (model.bfloat16()(ids).logits.float() - want).abs().mean()
    ours = (decoder.logits(decoder.hidden(ids)) - want).abs().mean()
    assert 0 < ours < 1.1 * theirs


WIDE = {"head_dim": 16}
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "llama-mha-biases-tied": (
        "llama",
        WIDE
        | {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama3-rope": ("llama", WIDE | {"rope_parameters": LLAMA3}),
    "mistral-window": ("mistral", WIDE | {"sliding_window": 5}),
    "qwen2-yarn-tied": (
        "qwen2",
        {"hidden_size": 96, "tie_word_embeddings": True, "rope_parameters": YARN},
    ),
    "qwen3": ("qwen3", WIDE),
    "qwen3-biases-tied": ("qwen3", WIDE | {"attention_bias": True, "tie_word_embeddings": True}),
}


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("case", STEPS)
def test_the_step_of_the_cpu_matches_transformers(case: str, threads: int, use_threads: None) -> None:
    """Half of a text read at once, the rest token by token; then another text in another cache."""
    model_type, changes = STEPS[case]
    model, ids = tiny(model_type, **changes), tokens(2, 40)
    with torch.no_grad():
        want = model(ids).logits
    weights = StateDict(model.state_dict())
    config = DecoderConfig.from_hf(model.config.to_dict())
    torch.set_num_threads(threads)
    decoder = load_decoder(config, weights, layout=Layout.AUTO)
    assert decoder.step is not None
    for row_T, want_TV in zip(ids, want, strict=True):
        cache = decoder.cache(1, 40)
        got = [decoder.prefill(row_T[None, :20], cache)]
        got += [decoder.decode(token[None], cache) for token in row_T[20:]]
        assert (torch.cat(got) - want_TV[19:]).abs().max() < TOLERANCE
        with pytest.raises(QConvertError, match=r"40 \+ 1 tokens do not fit the cache of 40"):
            decoder.decode(row_T[:1], cache)


@pytest.mark.parametrize("head", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_step_reads_packed_weights_and_a_cache_of_either_dtype(
    dtype: torch.dtype, head: int | None
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model, ids = tiny("qwen2", **sizes), tokens(1, 30)[0]
    weights, config = Quantized(model.state_dict(), group=32), DecoderConfig.from_hf(model.config.to_dict())
    exact = load_decoder(config, weights, head_bits=head)
    decoder = load_decoder(config, weights, dtype=dtype, layout=Layout.AUTO, head_bits=head)
    want = exact.logits(exact.hidden(ids[None]))[0]
    cache = decoder.cache(1, 30)
    got = torch.cat([decoder.decode(token[None], cache) for token in ids])
    tolerance = 1e-3 if dtype == torch.float32 else 2e-2
    assert decoder.step is not None and cache.length == 30
    assert (got - want).norm() / want.norm() < tolerance


@pytest.mark.parametrize("case", ["qwen2-moe", "qwen2"])
def test_what_the_step_cannot_read_is_decoded_layer_by_layer(case: str) -> None:
    """Sparse layers, and heads that fill no register."""
    model, ids = tiny(CASES[case][0], **CASES[case][1]), tokens(1, 9)
    config = DecoderConfig.from_hf(model.config.to_dict())
    decoder = load_decoder(config, StateDict(model.state_dict()), layout=Layout.AUTO)
    cache = decoder.cache(1, 9)
    decoder.prefill(ids[:, :8], cache)
    with torch.no_grad():
        want = model(ids).logits[:, -1]
    assert decoder.step is None
    assert (decoder.decode(ids[:, 8], cache) - want).abs().max() < TOLERANCE


def test_prefill_and_decode_return_what_follows() -> None:
    decoder, ids = decoder_of(tiny("qwen2")), tokens(3, 6)
    want = decoder.logits(decoder.hidden(ids))
    cache = decoder.cache(3, 6)
    assert torch.allclose(decoder.prefill(ids[:, :5], cache), want[:, 4], atol=TOLERANCE)
    assert torch.allclose(decoder.decode(ids[:, 5], cache), want[:, 5], atol=TOLERANCE)
    with pytest.raises(QConvertError, match=r"6 \+ 1 tokens do not fit the cache of 6"):
        decoder.decode(ids[:, 5], cache)


class Quantized(StateDict):
    """Round every matrix to 4-bit groups; `worth` gives transformers the same model, dequantized."""

    def __init__(self, state: dict[str, torch.Tensor], group: int = 8) -> None:
        super().__init__(state)
        self.encoding = AffineInt(4, group, True, DType.F32)

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        value = super().get(role, layer, kind)
        if not isinstance(value, DenseRows) or value.rows_RI.shape[1] == 1:
            return value
        scales, codes = self.round(value.rows_RI)
        return AffineIntRows(codes.reshape(value.rows_RI.shape), scales[..., 0], None, self.encoding)

    def worth(self) -> dict[str, torch.Tensor]:
        def dequantized(w: torch.Tensor) -> torch.Tensor:
            scales, codes = self.round(w.numpy())
            return torch.from_numpy(((codes.astype(np.float32) - 8) * scales).reshape(w.shape))

        return {name: dequantized(w) if w.ndim == 2 else w for name, w in self.state.items()}

    def round(self, w_OI: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        w_OGS = w_OI.reshape(len(w_OI), -1, self.encoding.group_size or 1)
        scales = (np.abs(w_OGS).max(-1, keepdims=True) / 7).astype(np.float32)
        return scales, (np.clip(np.rint(w_OGS / scales), -8, 7) + 8).astype(np.uint8)


@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_is_its_dequantized_self(tied: bool) -> None:
    model, ids = tiny("qwen2", tie_word_embeddings=tied), tokens(2, 10)
    weights = Quantized(model.state_dict())
    decoder = load_decoder(DecoderConfig.from_hf(model.config.to_dict()), weights)
    model.load_state_dict(weights.worth())
    with torch.no_grad():
        want = model(ids).logits
    assert (decoder.logits(decoder.hidden(ids)) - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("rows", [1, 40])
def test_packed_kernels_give_the_logits_of_the_reference(rows: int) -> None:
    """Against the same weights in float32, packed kernels are no further off than plain bfloat16."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    model, ids = tiny("qwen2", **sizes), tokens(1, rows)
    weights, config = Quantized(model.state_dict(), group=32), DecoderConfig.from_hf(model.config.to_dict())
    exact = load_decoder(config, weights)
    want = exact.logits(exact.hidden(ids)[0])
    errors = {}
    for layout in (Layout.REFERENCE, Layout.AUTO):
        decoder = load_decoder(config, weights, dtype=torch.bfloat16, layout=layout)
        errors[layout] = (decoder.logits(decoder.hidden(ids)[0]) - want).abs().mean()
    kinds = {linear.weight.kind for layer in decoder.layers for linear in layer.attention.qkv}
    assert (kinds, len(decoder.layers[0].attention.qkv)) == ({"int4-cpu"}, 1)
    assert 0 < errors[Layout.AUTO] < 1.2 * errors[Layout.REFERENCE]


def test_a_dense_copy_gives_the_logits_of_the_reference_bit_for_bit() -> None:
    model, ids = tiny("qwen3", hidden_size=64), tokens(2, 20)
    weights, config = Quantized(model.state_dict(), group=16), DecoderConfig.from_hf(model.config.to_dict())
    packed, dense = (load_decoder(config, weights, layout=each) for each in (Layout.REFERENCE, Layout.DENSE))
    assert {linear.weight.kind for layer in dense.layers for linear in layer.attention.qkv} == {"dense"}
    assert {packed.head.kind, packed.embed.kind} == {
        "int4"
    } and dense.head.kind == dense.embed.kind == "dense"
    assert torch.equal(dense.logits(dense.hidden(ids)), packed.logits(packed.hidden(ids)))


def test_an_int8_head_changes_logits_by_its_rounding() -> None:
    model, ids = tiny("qwen2"), tokens(1, 10)
    config, weights = DecoderConfig.from_hf(model.config.to_dict()), StateDict(model.state_dict())
    plain = load_decoder(config, weights)
    rounded = load_decoder(config, weights, head_bits=8)
    h_ND = plain.hidden(ids)[0]
    w_VD = model.lm_head.weight.detach().abs()
    bound = h_ND.abs().sum(-1, keepdim=True) * w_VD.amax(1) / 127 / 2
    error = (rounded.logits(h_ND) - plain.logits(h_ND)).abs()
    assert error.max() > 0 and bool((error <= bound + 1e-4).all())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda s: s.pop("model.layers.1.self_attn.o_proj.weight"),
            "layer 1: attn.o: the checkpoint has no weight",
        ),
        (
            lambda s: s.pop("model.layers.0.self_attn.k_proj.bias"),
            "layer 0: attn.k: the checkpoint has no bias",
        ),
        (lambda s: s.pop("lm_head.weight"), "lm_head: the checkpoint has no weight"),
        (
            lambda s: s.update({"model.norm.weight": torch.ones(47)}),
            r"final_norm: shape \[47\], but config.json implies \[48\]",
        ),
        (
            lambda s: s.update({"model.embed_tokens.weight": torch.ones(159, 48)}),
            r"embed: shape \[159, 48\], but config.json implies \[160, 48\]",
        ),
    ],
)
def test_weights_that_do_not_fit_the_config(change: Any, says: str) -> None:
    model = tiny("qwen2")
    state = dict(model.state_dict())
    change(state)
    with pytest.raises(CorruptCheckpoint, match=says):
        load_decoder(DecoderConfig.from_hf(model.config.to_dict()), StateDict(state))


def from_folder(folder: Path) -> Decoder:
    config = DecoderConfig.from_hf(json.loads((folder / "config.json").read_text()))
    return load_decoder(config, StateDict(safetensors.torch.load_file(folder / "model.safetensors")))


def test_stories260k_agrees_with_its_golden(assets: Path) -> None:
    folder = assets / "models" / "stories260K-hf"
    golden = json.loads((folder / "expected.json").read_text())
    decoder = from_folder(folder)
    ids = torch.tensor([golden["ppl_ids"]])
    nll = torch.nn.functional.cross_entropy(decoder.logits(decoder.hidden(ids))[0, :-1], ids[0, 1:])
    assert nll.item() == pytest.approx(golden["nll_per_token"], abs=1e-5)
    prompt = torch.tensor([golden["ppl_ids"][:16]])
    want = torch.tensor(golden["logits_last_of_first_16"])
    assert (decoder.prefill(prompt, decoder.cache(1, 16))[0] - want).abs().max() < TOLERANCE


def test_stories260k_tells_its_golden_story(assets: Path) -> None:
    folder = assets / "models" / "stories260K-hf"
    greedy = json.loads((folder / "expected.json").read_text())["greedy_ids"]
    decoder, told = from_folder(folder), greedy[:1]
    cache = decoder.cache(1, len(greedy))
    while len(told) < len(greedy):
        told.append(int(decoder.decode(torch.tensor(told[-1:]), cache).argmax()))
    assert told == greedy


def test_a_trained_qwen3_matches_transformers(assets: Path) -> None:
    folder = assets / "models" / "tiny-qwen3"
    decoder, ids = from_folder(folder), tokens(2, 128, vocab=4096)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        want = model(ids).logits
    assert (decoder.logits(decoder.hidden(ids)) - want).abs().max() < TOLERANCE


class RoundedToBfloat16:
    """A quantized checkpoint as transformers loads it: dequantized, rounded to bfloat16."""

    def __init__(self, weights: Weights) -> None:
        self.weights = weights

    def get(self, role: str, layer: int | None = None, kind: str = "weight") -> Value | None:
        value = self.weights.get(role, layer, kind)
        if not isinstance(value, AffineIntRows):
            return value
        rows = place_rows(value, torch.device("cpu"), torch.bfloat16).rows(slice(None))
        return DenseRows(rows.float().numpy(), DType.F32)


@pytest.mark.parametrize("name", ["ct-w4a16-sym-g128", "cut-ct-w4a16-asym-g128", "cut-ct-mixed-w4g128-w8ch"])
def test_a_quantized_checkpoint_gives_the_logits_of_the_tool_that_made_it(assets: Path, name: str) -> None:
    folder = assets / "fixtures" / "quantized" / name
    checkpoint = open_checkpoint(folder)
    config = DecoderConfig.from_hf(checkpoint.config)
    decoder = load_decoder(config, RoundedToBfloat16(CheckpointWeights(checkpoint)))
    prompt = json.loads((folder.parent / "prompt.json").read_text())["ids"]
    ids = torch.tensor([prompt]) % config.vocab
    golden = safetensors.torch.load_file(folder / "golden.safetensors")["logits.last_token"].flatten()
    assert (decoder.prefill(ids, decoder.cache(1, len(prompt)))[0] - golden).abs().max() < TOLERANCE
