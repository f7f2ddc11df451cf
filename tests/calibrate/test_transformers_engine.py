"""Statistics of models that transformers runs: as our decoder has them, and as hooks see them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from qconvert.calibrate import transformers_engine as engine
from qconvert.calibrate.run import calibrate, calibrate_elsewhere, read_text
from qconvert.calibrate.statistics_file import StoredStatistics, read_statistics
from qconvert.calibrate.transformers_engine import TransformersModel
from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.statistics import InputKey, StatisticsKey
from qconvert.errors import BadRecipe, QConvertError
from qconvert.models import Architecture
from qconvert.models.statistics_keys import inputs_of
from tests.calibrate.test_calibration_text import dialogue
from tests.support.commands import failed, made, qconvert
from tests.support.decoder_models import tiny
from tests.support.family_models import LATENT, ROWS, small

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
GPT: dict[str, Any] = {"vocab_size": 260, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}
SPARSE: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
LATENT_MOE = LATENT | {"q_lora_rank": None, "moe_intermediate_size": 32, "n_shared_experts": 1}
LATENT_MOE |= {"first_k_dense_replace": 1, "num_key_value_heads": 4, "kv_lora_rank": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("phi3", SIZES | {"pad_token_id": 0}),
    "gemma": ("gemma", SIZES | {"head_dim": 16}),
    "qwen3-moe": ("qwen3_moe", SIZES | SPARSE | {"mlp_only_layers": []}),
    "mixtral": ("mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt-oss": (
        "gpt_oss",
        SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "gpt2": ("gpt2", GPT | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}),
    "deepseek-v2": ("deepseek_v2", SIZES | LATENT_MOE),
    "persimmon": ("persimmon", SIZES),
}
HOW = ("--tokens", 512, "--window", 64)


def saved(folder: Path, case: str, **changes: Any) -> Path:
    """A random model of a family, with a tokenizer of bytes."""
    model_type, sizes = MODELS[case]
    dialogue(folder)
    tiny(model_type, deviation=0.1, **(sizes | changes)).save_pretrained(folder)
    return folder


def run(folder: Path, tokens: int = 512, **options: Any) -> StoredStatistics:
    """Statistics of some text in transformers."""
    model = TransformersModel.of(open_checkpoint(folder))
    text = read_text(model.checkpoint, ["default"], tokens, 64, positions=model.positions)
    return calibrate_elsewhere(model, "m", text, **options)


def assert_close(found: StoredStatistics, want: StoredStatistics) -> None:
    """Counts are equal, sums to 1e-4 of the largest or better."""
    ours, theirs = found.statistics, want.statistics
    assert ours.inputs.keys() == theirs.inputs.keys() and found.model == want.model
    assert np.array_equal(ours.token_counts_V, theirs.token_counts_V)
    for key, moments in ours.inputs.items():
        same = theirs.inputs[key]
        assert moments.count == same.count, key
        np.testing.assert_allclose(moments.squares_I, same.squares_I, rtol=1e-4, err_msg=str(key))
        np.testing.assert_allclose(moments.sums_I, same.sums_I, atol=1e-3 * max(1, abs(same.sums_I).max()))


@pytest.mark.parametrize("case", ["phi3", "gemma", "qwen3-moe", "mixtral", "gpt-oss"])
def test_a_family_that_both_run_has_the_same_statistics(case: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / case, case)
    found, checkpoint = run(folder), open_checkpoint(folder)
    own = calibrate(checkpoint, "m", read_text(checkpoint, ["default"], 512, 64))
    assert_close(found, own)
    assert found.left_out == () and "Model" not in found.texts[0]["engine"]
    assert found.texts[0]["engine"].startswith(f"transformers {transformers.__version__} ")


def test_a_trained_model_has_the_same_statistics(assets: Path) -> None:
    checkpoint = open_checkpoint(assets / "models" / "tiny-qwen3")
    model = TransformersModel.of(checkpoint)
    text = read_text(checkpoint, ["default"], 1024, 256, positions=model.positions)
    assert_close(calibrate_elsewhere(model, "m", text), calibrate(checkpoint, "m", text))


# Families that only transformers runs, against hooks on its modules.


def module_inputs(folder: Path, ids_BT: torch.Tensor, module: type) -> dict[str, np.ndarray]:
    """The sum of squares of what every module of a class is called with, by its name."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval(), {}

    def keep(name: str) -> Callable[..., None]:
        def hook(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            found[name] = args[0].double().flatten(0, -2).square().sum(0).numpy()

        return hook

    for name, each in model.named_modules():
        if isinstance(each, module):
            each.register_forward_pre_hook(keep(name))
    with torch.no_grad():
        model(ids_BT)
    return found


def windows(folder: Path) -> torch.Tensor:
    model = TransformersModel.of(open_checkpoint(folder))
    text = read_text(model.checkpoint, ["default"], 512, 64, positions=model.positions)
    return torch.from_numpy(text.tokens_BT)


def test_input_major_and_fused_linears_are_those_of_hooks(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    folder = saved(tmp_path / "gpt2", "gpt2")
    found = run(folder)
    want = module_inputs(folder, windows(folder), (Conv1D, torch.nn.Linear))
    modules = {
        "attn.q+attn.k+attn.v": "attn.c_attn",
        "attn.o": "attn.c_proj",
        "mlp.up": "mlp.c_fc",
        "mlp.down": "mlp.c_proj",
    }
    names = {
        f"layers.{i}.{ours}": f"transformer.h.{i}.{its}" for ours, its in modules.items() for i in (0, 1)
    }
    names["model.lm_head"] = "lm_head"
    assert len(want) == len(found.statistics.inputs) == len(names)
    for key, moments in found.statistics.inputs.items():
        assert moments.count == 512
        np.testing.assert_allclose(moments.squares_I, want[names[key.place]], rtol=1e-4)


def test_an_undeclared_family_is_known_by_the_names_of_its_linears(tmp_path: Path, here: Path) -> None:
    folder = saved(tmp_path / "persimmon", "persimmon")
    ran = qconvert("calibrate", folder, *HOW, "--engine", "transformers", "-o", "stats")
    assert ran.code == 0 and "transformers' PersimmonForCausalLM runs, whole in memory" in ran.err, ran.err
    want = module_inputs(folder, windows(folder), torch.nn.Linear)
    found = read_statistics(Path("stats")).statistics.by_linear
    for name, squares_I in want.items():
        if ".layers." in name:
            prefix, layers, number, rest = name.split(".", 3)
            moments = found[StatisticsKey(f"{prefix}.{layers}.{rest}", int(number))]
            np.testing.assert_allclose(moments.squares_I, squares_I, rtol=1e-4)
    how = ("--bits", 4, "--group-size", 32, "--allow-unknown", "--calibration", "stats")
    out = made("quantize", folder, *how, "-o", "out")
    assert json.loads((out / "qconvert.json").read_text())["statistics"]["tensors"] == 2 * 4


def routed(folder: Path, ids_BT: torch.Tensor) -> dict[tuple[int, int, str], tuple[int, np.ndarray]]:
    """What every expert's products read, computed from the layer's input, its routing and its weights."""
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval(), {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(experts: Any, args: tuple[torch.Tensor, ...]) -> None:
            x_ND, chosen_NS = args[0].double(), args[1]
            for expert in range(len(experts.down_proj)):
                rows_RD = x_ND[(chosen_NS == expert).any(1)]
                gate, up = (rows_RD @ experts.gate_up_proj[expert].double().T).chunk(2, -1)
                read_RI = torch.nn.functional.silu(gate) * up
                for kind, rows in (("gate", rows_RD), ("down", read_RI)):
                    found[layer, expert, kind] = len(rows), rows.square().sum(0).numpy()

        return hook

    for name, each in model.named_modules():
        if name.endswith(".experts"):
            each.register_forward_pre_hook(keep(int(name.split(".")[2])))
    with torch.no_grad():
        model(ids_BT)
    return found


def test_experts_in_a_stack_have_what_is_routed_to_each(tmp_path: Path) -> None:
    folder = saved(tmp_path / "v2", "deepseek-v2")
    found = run(folder)
    want = routed(folder, windows(folder))
    assert len(want) == 4 * 2 and sum(n for (_, _, kind), (n, _) in want.items() if kind == "gate") == 512 * 2
    for (layer, expert, kind), (count, squares_I) in want.items():
        moments = found.statistics.by_linear[StatisticsKey(f"mlp.experts.{kind}", layer, expert)]
        assert moments.count == count
        np.testing.assert_allclose(moments.squares_I, squares_I, rtol=1e-4)
    dense = module_inputs(folder, windows(folder), torch.nn.Linear)
    for role, module in (
        ("attn.kv_b", "self_attn.kv_b_proj"),
        ("mlp.shared.down", "mlp.shared_experts.down_proj"),
    ):
        moments = found.statistics.by_linear[StatisticsKey(role, 1)]
        np.testing.assert_allclose(moments.squares_I, dense[f"model.layers.1.{module}"], rtol=1e-4)


@pytest.mark.parametrize(
    "case", ["falcon-7b", "falcon-40b", "glm4-moe", "qwen3.5-moe", "openai-gpt", "rwkv", "bert-masked"]
)
def test_every_input_is_seen(case: str, tmp_path: Path) -> None:
    """Classes of linears, routers and experts of many kinds: each as often as there are tokens."""
    config = dict(ROWS[case].config)
    (name,) = config.pop("architectures")
    made_of = transformers.AutoConfig.for_model(**config)
    getattr(transformers, name)(made_of).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    found = TransformersModel.of(checkpoint).collect(np.arange(32).reshape(2, 16))
    assert found.left_out == ()
    assert set(found.statistics.inputs) == set(inputs_of(checkpoint.architecture).values())
    assert {m.count for key, m in found.statistics.inputs.items() if key.expert is None} == {32}


def test_an_expert_that_is_never_chosen_is_told_and_weighs_all_alike(tmp_path: Path) -> None:
    folder = saved(tmp_path / "moe", "qwen3-moe", num_experts=48, num_experts_per_tok=1)
    model = TransformersModel.of(open_checkpoint(folder))
    found = model.collect(np.full((1, 16), 7)).statistics
    assert 40 < len({expert for layer, expert in found.unrouted if layer == 0}) < 48
    key = StatisticsKey("mlp.experts.down", *found.unrouted[0])
    assert set(found.by_linear[key].mean_squares_I) == {1.0}


def test_experts_that_cannot_be_seen_are_left_out_and_named(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class that multiplies by a copy of the weights of the chosen experts."""
    folder = saved(tmp_path / "moe", "qwen3-moe")
    load = engine.TransformersModel._load

    def batched(self: TransformersModel, device: str) -> Any:
        model = load(self, device)
        model.set_experts_implementation("batched_mm")
        return model

    monkeypatch.setattr(engine.TransformersModel, "_load", batched)
    ran = qconvert("calibrate", folder, *HOW, "--engine", "transformers", "-o", "stats")
    assert ran.code == 0 and "layers.0.mlp.experts.gate+mlp.experts.up" in ran.err and "(4 in all)" in ran.err
    stored = read_statistics(Path("stats"))
    stacks = ("mlp.experts.down", "mlp.experts.gate+mlp.experts.up")
    assert set(stored.left_out) == {f"layers.{i}.{stack}" for i in (0, 1) for stack in stacks}
    out = made("quantize", folder, "--bits", 4, "--group-size", 32, "--calibration", "stats", "-o", "out")
    manifest = json.loads((out / "qconvert.json").read_text())
    assert manifest["statistics"]["tensors"] == 2 * 4  # q, k, v and o
    assert manifest["statistics"]["texts"][0]["left_out"] == list(stored.left_out)
    import jsonschema

    schema = Path(__file__).resolve().parents[2] / "qconvert" / "manifest.schema.json"
    jsonschema.validate(manifest, json.loads(schema.read_text()))


def test_layers_pass_as_the_batches_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BATCH_TOKENS", 256)
    told: list[tuple[int, int]] = []
    run(saved(tmp_path / "gpt2", "gpt2"), progress=lambda *done: told.append(done))
    assert told == [(256 * n, 1024) for n in range(1, 5)]


# The whole way, and what is refused.


def error_weighted(original: Path, quantized: Path, stored: StoredStatistics) -> float:
    """The sum over linears of E[x^2] times squared errors of weights, relative to that of the weights."""
    plain = {name: t for file in sorted(original.glob("*.safetensors")) for name, t in _tensors(file)}
    back = made("dequantize", quantized, "-o", quantized.with_name(f"{quantized.name}-back"))
    rounded = {name: t for file in sorted(back.glob("*.safetensors")) for name, t in _tensors(file)}
    architecture, total = open_checkpoint(original).architecture, 0.0
    for name, key in inputs_of(architecture).items():
        if key in stored.statistics.inputs and name in plain and key.layer is not None:
            mean_I = stored.statistics.inputs[key].mean_squares_I
            error, size = rounded[name] - plain[name], plain[name]
            total += float((error**2 @ mean_I).sum() / (size**2 @ mean_I).sum())
    return total


def _tensors(file: Path) -> list[tuple[str, np.ndarray]]:
    import safetensors.torch

    return [(name, t.float().numpy()) for name, t in safetensors.torch.load_file(file).items()]


@pytest.mark.parametrize("case", ["phi3", "deepseek-v2"])
def test_codes_weighed_by_these_statistics_err_less_where_it_counts(
    case: str, tmp_path: Path, here: Path
) -> None:
    folder = saved(tmp_path / case, case)
    stats = made("calibrate", folder, *HOW, "--engine", "transformers", "-o", "stats").parent
    outs = [
        made("quantize", folder, "--bits", 4, "--group-size", 32, *more, "-o", f"out{len(more)}")
        for more in ((), ("--calibration", stats))
    ]
    plain, weighed = (error_weighted(folder, out, read_statistics(stats)) for out in outs)
    assert 0 < weighed < 0.97 * plain


def test_every_writing_command_takes_them(tmp_path: Path, here: Path) -> None:
    folder = saved(tmp_path / "gpt2", "gpt2")
    stats = made("calibrate", folder, *HOW, "--engine", "transformers", "-o", "stats").parent
    made("calibrate", folder, "--merge", stats, "--imatrix", "i.gguf")
    to_gguf = ("to-gguf", folder, "--type", "q4_0", "--pre-tokenizer", "gpt-2")
    convert = ("convert", folder, "--scheme", "int4-g32", "--to", "gptq")
    for command, name in ((to_gguf, "{}.gguf"), (convert, "folder-{}")):
        outs = [
            made(*command, *more, "-o", name.format(i))
            for i, more in enumerate(((), ("--calibration", stats), ("--calibration", "i.gguf")))
        ]
        plain, weighed, same = (
            (out / "model.safetensors" if out.is_dir() else out).read_bytes()[-40_000:] for out in outs
        )
        assert plain != weighed == same


def test_the_error_of_our_own_decoder_names_the_engine(tmp_path: Path, here: Path) -> None:
    ran = qconvert("calibrate", saved(tmp_path / "gpt2", "gpt2"), *HOW, "-o", "stats")
    assert ran.code == 1 and "Error: config.json: model_type 'gpt2' is not run here\n" in ran.err
    assert "Hint: transformers may run it: add --engine transformers; llama.cpp may" in ran.err
    assert not Path("stats").exists() or not list(Path("stats").iterdir())


def test_a_missing_library_is_told_with_the_command_that_gets_it(
    tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path / "gpt2", "gpt2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    ran = qconvert("calibrate", folder, *HOW, "--engine", "transformers", "-o", "stats")
    failed(ran, "--engine transformers: transformers is not installed", 'pip install "transformers>=5"')


def edited(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


CODE = {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"}


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path, here: Path) -> None:
    folder = saved(tmp_path / "gpt2", "gpt2")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    asked = ("calibrate", folder, *HOW, "--engine", "transformers", "-o")
    plain = made(*asked, "plain")
    edited(folder, auto_map=CODE, attn_implementation="someone/code", experts_implementation="someone/code")
    ran = qconvert(*asked, "own")
    assert ran.code == 0 and "(auto_map) is not run" in ran.err
    assert (Path("own") / "statistics.safetensors").read_bytes() == plain.read_bytes()
    edited(folder, model_type="own", architectures=["OwnModel"])
    ran = qconvert(*asked, "none")
    assert ran.code == 1 and not (tmp_path / "ran").exists()
    assert "has no class for model_type 'own'; the code that comes with the checkpoint (auto_map)" in ran.err
    assert "Traceback" not in ran.err


def test_what_cannot_be_run_is_told(tmp_path: Path, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path / "gpt2", "gpt2")
    with pytest.raises(BadRecipe, match="--window 65: the model has 64 positions"):
        TransformersModel.of(open_checkpoint(folder)).collect(np.zeros((1, 65), np.int64))
    with pytest.raises(BadRecipe, match="token 260 is beyond the model's 260 rows"):
        TransformersModel.of(open_checkpoint(folder)).collect(np.full((1, 16), 260))
    asked = ("calibrate", folder, *HOW, "--engine", "transformers", "-o", "stats")
    edited(folder, n_inner=96)
    ran = qconvert(*asked)
    assert ran.code == 1 and ran.err.count("\n") < 6 and "Traceback" not in ran.err
    monkeypatch.setattr("os.sysconf", lambda name: 100)
    with pytest.raises(QConvertError, match=r"holds the whole model, 0\.0 GB in float32; this machine"):
        TransformersModel.of(open_checkpoint(folder)).collect(np.zeros((1, 16), np.int64))


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    import safetensors.torch

    folder = saved(tmp_path / "gpt2", "gpt2")
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.weight"]
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model = TransformersModel.of(open_checkpoint(folder))
    with pytest.raises(QConvertError, match=r"transformer.h.1.mlp.c_fc.weight: GPT2LMHeadModel of transf"):
        model.collect(np.zeros((1, 16), np.int64))


def test_encoders_and_quantized_models_are_refused(tmp_path: Path, here: Path) -> None:
    folder = saved(tmp_path / "qwen", "phi3")
    made("quantize", folder, "--bits", 8, "--group-size", 32, "-o", "int8")
    ran = qconvert("calibrate", "int8", *HOW, "--engine", "transformers", "-o", "stats")
    assert ran.code == 1 and "int8: is quantized (compressed-tensors" in ran.err
    config = {"model_type": "t5", "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2}
    transformers.T5ForConditionalGeneration(transformers.T5Config(**config, vocab_size=260)).save_pretrained(
        "t5"
    )
    with pytest.raises(QConvertError, match="model_type 't5' predicts no next token in transformers"):
        TransformersModel.of(open_checkpoint(Path("t5")))


def test_shared_inputs_are_one_key_in_every_family() -> None:
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    experts |= {"shared_expert_intermediate_size": 8}
    architecture = Architecture.of(small("qwen2_moe", "Qwen2MoeForCausalLM", **experts))
    found = dict.fromkeys(inputs_of(architecture).values())
    assert [key for key in found if key.layer == 1] == [
        InputKey(("attn.q", "attn.k", "attn.v"), 1),
        InputKey(("attn.o",), 1),
        InputKey(("mlp.router",), 1),
        *(
            InputKey(roles, 1, expert)
            for expert in (0, 1)
            for roles in (("mlp.experts.gate", "mlp.experts.up"), ("mlp.experts.down",))
        ),
        InputKey(("mlp.shared.gate", "mlp.shared.up"), 1),
        InputKey(("mlp.shared.down",), 1),
        InputKey(("mlp.shared_gate",), 1),
    ]


def test_stacks_under_other_names_in_memory_and_an_infinite_limit(tmp_path: Path, here: Path) -> None:
    """Granite 4: its class has experts under other names than its files, which say infinity by an object."""
    from tests.support.newer_families import made as made_newer

    folder = tmp_path / "granite4"
    made_newer(folder, "granite4")
    assert "__float__" in (folder / "config.json").read_text()
    ran = qconvert("calibrate", folder, *HOW, "--engine", "transformers", "-o", "stats")
    assert ran.code == 0, ran.err
    found = read_statistics(Path("stats")).statistics.by_linear
    experts = {(key.layer, key.expert) for key in found if key.role == "mlp.experts.down"}
    assert len(experts) >= 3 * 2 and {layer for layer, _ in experts} == {0, 1, 2}
