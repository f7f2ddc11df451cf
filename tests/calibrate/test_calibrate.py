"""Statistics of inputs: against transformers' hooks and llama-imatrix's file; stored and merged."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from qconvert.calibrate import collect
from qconvert.calibrate.collect import collect_statistics
from qconvert.calibrate.imatrix import imatrix_entries, open_imatrix
from qconvert.calibrate.moments import InputMoments, InputStatistics
from qconvert.calibrate.statistics_file import (
    StoredStatistics,
    merge,
    open_statistics,
    read_statistics,
    write_statistics,
)
from qconvert.core.ggml_types import KV
from qconvert.core.statistics import InputKey, StatisticsKey
from qconvert.errors import BadRecipe, CorruptCheckpoint, QConvertError
from qconvert.formats.gguf.imatrix import ImatrixEntry, read_imatrix, write_imatrix
from qconvert.formats.gguf.reader import GGUFFile
from qconvert.models import Architecture
from qconvert.runtime.load import load_decoder
from qconvert.runtime.model import Decoder
from tests.runtime.test_decoder_families import deepseek, opened
from tests.runtime.test_decoder_observers import hooked, module_of
from tests.support.commands import made
from tests.support.decoder_models import StateDict, decoder_of, tiny, tokens
from tests.support.family_models import EXPERTS, small
from tests.support.models import tiny_config

TEXT = {"texts": ["t.txt"], "files": [], "tokens": 64, "window": 16, "protocol": "packed"}
KEY = InputKey(("attn.q", "attn.k", "attn.v"), 0)


def ids(batch: int, length: int) -> np.ndarray:
    return tokens(batch, length).numpy().astype(np.int64)


def assert_like_hooks(found: InputStatistics, model: torch.nn.Module, ids_BT: np.ndarray) -> None:
    """Sums of what every module read when all windows were run as one batch."""
    want = hooked(model, torch.from_numpy(ids_BT))
    for key, moments in found.inputs.items():
        if moments.count:
            x_NI = want[module_of(key)].double().numpy()
            assert moments.count == len(x_NI)
            np.testing.assert_allclose(moments.squares_I, (x_NI**2).sum(0), rtol=1e-4)
            np.testing.assert_allclose(moments.sums_I, x_NI.sum(0), atol=1e-3)


def test_sums_are_those_of_transformers_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids_BT = tiny("qwen3", head_dim=16), ids(5, 12)
    monkeypatch.setattr(collect, "BATCH_BYTES", 1)  # every window by itself
    told: list[tuple[int, int]] = []
    found = collect_statistics(decoder_of(model), ids_BT, lambda *done: told.append(done))
    assert_like_hooks(found, model, ids_BT)
    assert len(found.inputs) == 4 * 3 + 1 and len(found.by_linear) == 7 * 3 + 1
    assert told == [(12 * n, 180) for n in range(1, 16)] and found.tokens == 60
    assert np.array_equal(found.token_counts_V, np.bincount(ids_BT.ravel(), minlength=160))


def test_batches_and_files_of_activations_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids_BT = tiny("qwen3", head_dim=16), ids(5, 12)
    whole = collect_statistics(decoder_of(model), ids_BT)
    monkeypatch.setattr(collect, "BATCH_BYTES", 200_000)
    parts = collect_statistics(decoder_of(model, fused=True), ids_BT)
    for key, moments in whole.inputs.items():
        np.testing.assert_allclose(parts.inputs[key].squares_I, moments.squares_I, rtol=1e-5)


def test_layers_are_read_one_at_a_time() -> None:
    model, ids_BT = tiny("qwen3", head_dim=16), ids(2, 12)
    whole = decoder_of(model)
    weights = StateDict(model.state_dict())
    decoder = load_decoder(whole.config, weights, on_demand=True)
    found, want = (collect_statistics(each, ids_BT) for each in (decoder, whole))
    for key, moments in want.inputs.items():
        assert np.array_equal(found.inputs[key].squares_I, moments.squares_I)


def test_experts_count_what_is_routed_to_them_and_the_others_are_told(tmp_path: Path) -> None:
    model, few = deepseek(tmp_path / "deepseek"), ids(1, 2)
    found = collect_statistics(opened(tmp_path / "deepseek"), few)
    assert_like_hooks(found, model, few)
    experts = {key: m.count for key, m in found.inputs.items() if key.roles == ("mlp.experts.down",)}
    assert len(experts) == 12 and sum(experts.values()) == 2 * 3 * 2  # three experts for two tokens, twice
    never = [(key.layer, key.expert) for key, count in experts.items() if not count]
    assert never and found.unrouted == sorted(never)
    idle = found.by_linear[StatisticsKey("mlp.experts.up", *never[0])]
    assert np.array_equal(idle.mean_squares_I, np.ones(48, np.float32))


def spoiled(value: float) -> Decoder:
    model = tiny("qwen3", head_dim=16)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = value
    return decoder_of(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38])
def test_inputs_that_are_no_numbers_are_told_by_their_place(value: float) -> None:
    with pytest.raises(
        QConvertError, match=r"layer 1: the input of mlp.down holds NaN or infinity in \d+ of"
    ):
        collect_statistics(spoiled(value), ids(2, 12))


def test_windows_that_the_model_cannot_read_are_told() -> None:
    decoder = decoder_of(tiny("qwen3", head_dim=16))
    with pytest.raises(BadRecipe, match="--window 65: the model has 64 positions"):
        collect_statistics(decoder, ids(1, 65))
    with pytest.raises(BadRecipe, match="token 160 is beyond the model's 160 rows"):
        collect_statistics(decoder, np.full((1, 16), 160))


# The file


def stored(scale: float = 1.0, **model: str) -> StoredStatistics:
    """Statistics of one dense input and of two experts."""
    named = {"name": "m", "shapes_sha256": "a" * 64} | model
    moments = InputMoments(np.arange(4.0) * scale, -np.arange(4.0), 64)
    idle = InputMoments(np.zeros(3), np.zeros(3), 0)
    down = ("mlp.experts.down",)
    used = InputMoments(np.array([1.0, 4, 9]), np.ones(3), 5)
    inputs = {KEY: moments, InputKey(down, 0, 0): used, InputKey(down, 0, 1): idle}
    return StoredStatistics(InputStatistics(inputs, np.array([60, 0, 4])), named, (TEXT,))


def test_the_file_gives_back_what_was_written(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_statistics(tmp_path / folder / "statistics.safetensors", stored())
    files = [tmp_path / folder / "statistics.safetensors" for folder in ("a", "b")]
    assert files[0].read_bytes() == files[1].read_bytes()
    found = read_statistics(tmp_path / "a")
    assert (found.model, found.texts, found.window) == (stored().model, (TEXT,), 16)
    assert found.statistics.inputs.keys() == stored().statistics.inputs.keys()
    for key, moments in stored().statistics.inputs.items():
        same = found.statistics.inputs[key]
        assert np.array_equal(same.squares_I, moments.squares_I) and same.count == moments.count
        assert np.array_equal(same.sums_I, moments.sums_I)
    assert StatisticsKey("attn.k", 0) in found and StatisticsKey("attn.o", 0) not in found
    assert np.array_equal(found.second_moments(StatisticsKey("attn.v", 0)), np.arange(4, dtype="f4") / 64)
    assert found.second_moments(StatisticsKey("mlp.experts.down", 0, 1)).tolist() == [1, 1, 1]
    import safetensors.numpy

    tensors = safetensors.numpy.load_file(files[0])
    assert tensors["layers.0.mlp.experts.down.squares"].shape == (2, 3)
    assert tensors["layers.0.attn.q+attn.k+attn.v.counts"].tolist() == [64]
    assert tensors["token_counts"].tolist() == [60, 0, 4]


def test_statistics_of_two_texts_add_up() -> None:
    both = merge([stored(), stored(2.0)])
    assert both.statistics.inputs[KEY].squares_I.tolist() == [0, 3, 6, 9]
    assert both.statistics.inputs[KEY].count == 128 and both.statistics.tokens == 128
    assert both.texts == (TEXT, TEXT) and both.record["chunks"] == 8
    with pytest.raises(BadRecipe, match=r"belongs to other \(shapes b{12}\), and .* to m \(shapes a{12}\)"):
        merge([stored(), stored(name="other", shapes_sha256="b" * 64)])


def test_windows_of_a_text_are_worth_what_they_are_in_two_runs() -> None:
    decoder, ids_BT = decoder_of(tiny("qwen3", head_dim=16)), ids(4, 12)
    whole, first, last = (collect_statistics(decoder, part) for part in (ids_BT, ids_BT[:1], ids_BT[1:]))
    both = first + last
    for key, moments in whole.inputs.items():
        np.testing.assert_allclose(both.inputs[key].squares_I, moments.squares_I, rtol=1e-5)
        assert both.inputs[key].count == moments.count


@pytest.mark.parametrize("what", ["format", "texts", "counts", "negative", "cut"])
def test_damaged_files_are_refused(tmp_path: Path, what: str) -> None:
    import safetensors.numpy

    path = tmp_path / "s.safetensors"
    write_statistics(path, stored())
    tensors = dict(safetensors.numpy.load_file(path))
    with safetensors.safe_open(path, "np") as file:
        metadata = file.metadata()
    if what in ("format", "texts"):
        metadata[what] = {"format": "pt", "texts": '{"texts": [1]}'}[what]
    elif what == "counts":
        del tensors["layers.0.attn.q+attn.k+attn.v.counts"]
    elif what == "negative":
        tensors["layers.0.mlp.experts.down.squares"][0, 0] = -1
    safetensors.numpy.save_file(tensors, path, metadata)
    if what == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptCheckpoint, match=r"s.safetensors: "):
        read_statistics(path)


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    architecture = Architecture.of(tiny_config("qwen3"))
    inputs = {KEY: InputMoments(np.ones(256), np.ones(256), 3)}
    found = replace(stored(), statistics=InputStatistics(inputs, np.array([3])))
    write_statistics(tmp_path / "s.safetensors", found)
    with pytest.raises(BadRecipe, match=r"has the statistics of 1 layers \(m\), the model 2"):
        open_statistics(tmp_path / "s.safetensors", architecture)
    inputs[replace(KEY, layer=1)] = InputMoments(np.ones(255), np.ones(255), 3)
    write_statistics(tmp_path / "s.safetensors", found)
    with pytest.raises(
        BadRecipe, match=r"layers.1.self_attn.q_proj.weight: .* 255 columns for it, the model 256"
    ):
        open_statistics(tmp_path / "s.safetensors", architecture)
    inputs[replace(KEY, layer=1)] = InputMoments(np.ones(256), np.ones(256), 3)
    write_statistics(tmp_path / "s.safetensors", found)
    assert StatisticsKey("attn.q", 1) in open_statistics(tmp_path / "s.safetensors", architecture)


# llama.cpp's importance matrix


def test_an_importance_matrix_reads_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    entries = {
        "blk.1.ffn_up.weight": ImatrixEntry(rng.random((1, 8)), np.array([1024])),
        "blk.0.ffn_up_exps.weight": ImatrixEntry(rng.random((3, 4)), np.array([1000, 24, 0])),
    }
    path = tmp_path / "i.gguf"
    write_imatrix(path, entries, datasets=["a.txt", "b.txt"], window=512)
    found = read_imatrix(path)
    assert (found.dataset, found.chunks, list(found.means)) == ("a.txt", 2, sorted(entries))
    np.testing.assert_allclose(
        found.means["blk.1.ffn_up.weight"], entries["blk.1.ffn_up.weight"].squares_EI[0] / 1024
    )
    stack = entries["blk.0.ffn_up_exps.weight"]
    want = np.vstack([stack.squares_EI[:2] / stack.counts_E[:2, None], np.ones((1, 4))])
    np.testing.assert_allclose(
        np.array(found.means["blk.0.ffn_up_exps.weight"]).reshape(3, 4), want, rtol=1e-6
    )
    gguf = pytest.importorskip("gguf")
    theirs = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    assert theirs["blk.0.ffn_up_exps.weight.counts"].ravel().tolist() == [1000, 24, 0]
    assert theirs["blk.0.ffn_up_exps.weight.in_sum2"].shape == (3, 4)


def test_every_tensor_of_a_mixture_has_an_entry_and_the_head_when_asked(tmp_path: Path) -> None:
    sizes = {**EXPERTS, "moe_intermediate_size": 32, "head_dim": 8, "norm_topk_prob": True}
    config = small("qwen3_moe", "Qwen3MoeForCausalLM", **sizes) | {"tie_word_embeddings": False}
    architecture = Architecture.of(config)
    weights = [p for p in architecture.parameters.values() if p.param == "weight"]
    linears = [p for p in weights if p.kind == "linear" or p.role == "mlp.router"]
    moments = {}
    for n, parameter in enumerate(linears):
        expert = int(parameter.role.split(".")[2]) if ".experts." in parameter.role else None
        key = StatisticsKey(parameter.group, parameter.layer, expert)
        moments[key] = InputMoments(np.full(parameter.shape[-1], n + 1.0), np.zeros(parameter.shape[-1]), 2)
    moments[StatisticsKey("lm_head")] = InputMoments(np.ones(config["hidden_size"]), np.ones(1), 2)
    entries = imatrix_entries(moments, architecture)
    names = {name.split(".", 2)[-1] for name in entries}
    dense = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate_inp"}
    stacks = {"ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"}
    assert names == {f"{name}.weight" for name in dense | stacks}
    assert set(imatrix_entries(moments, architecture, head=True)) - set(entries) == {"output.weight"}
    write_imatrix(tmp_path / "i.gguf", entries, datasets=["t"], window=1)
    back = open_imatrix(tmp_path / "i.gguf", architecture)
    for key, each in moments.items():
        if key.role != "lm_head":
            assert np.array_equal(back.second_moments(key), each.mean_squares_I)


def first_layers(model: Path, folder: Path, count: int) -> Path:
    """A copy of a model in one file whose other layers are left out."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_hidden_layers": count, "layer_types": config["layer_types"][:count]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(model / "model.safetensors")
    kept = {name: value for name, value in weights.items() if layer_of(name) < count}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


def layer_of(name: str) -> int:
    found = re.search(r"(?:layers|blk)\.(\d+)\.", name)
    return int(found[1]) if found else 0


def test_sums_and_counts_are_those_of_llama_imatrix(assets: Path, tmp_path: Path) -> None:
    """Its file was made of the same text in the same windows. It ran a BF16 file, whose products round
    activations to bf16: single columns are off by up to 0.3 %, whole inputs by less than 0.02 %.
    Of its eight layers the first three are compared, which read nothing of the others.
    """
    text, out = assets / "fixtures" / "gguf" / "imatrix-200k.txt", tmp_path / "ours.gguf"
    how = ("--text", text, "--tokens", "all", "--imatrix", out)
    assert made("calibrate", first_layers(assets / "models" / "tiny-qwen3", tmp_path / "m", 3), *how) == out
    theirs = assets / "fixtures" / "gguf" / "imatrix.gguf"
    with GGUFFile(out) as ours, GGUFFile(theirs) as other:
        compared = [entry for entry in other.tensors.items() if layer_of(entry[0]) < 3]
        assert list(ours.tensors.items()) == compared and len(compared) == 3 * 7 * 2
        mine = {key: entry for key, entry in ours.kv.items() if key != "imatrix.datasets"}
        assert mine == {key: entry for key, entry in other.kv.items() if key != "imatrix.datasets"}
        assert ours.kv["imatrix.datasets"] == KV.texts("imatrix.datasets", ("imatrix-200k.txt",))
        errors = []
        for name, spec in ours.specs.items():
            a, b = (file.read(name, 0, spec.rows).astype(float) for file in (ours, other))
            if name.endswith(".counts"):
                assert np.array_equal(a, b)
            else:
                errors.append(np.abs(a / b - 1).ravel())
                assert abs(a.sum() / b.sum() - 1) < 2.5e-4
    assert np.quantile(np.concatenate(errors), [0.5, 0.99]) == pytest.approx([1e-4, 1e-3], rel=0.3)
