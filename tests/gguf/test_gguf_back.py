"""`from-gguf` of every family: what was written comes back, and transformers computes the same with it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.core.ggml_types import KV, GGMLType, GGUFTensor
from qconvert.formats.gguf.reader import GGUFFile
from tests.gguf.test_from_gguf import run
from tests.gguf.test_gguf_encoders import SIZES_T5, T5, bert
from tests.gguf.test_gguf_families import CONFIGS, IDS
from tests.gguf.test_gguf_mixtures import CASES, LATENT, OSS
from tests.gguf.test_gguf_relatives import byte_tokenizer
from tests.support.commands import qconvert
from tests.support.gguf_families import add_tokenizer, random_model, scatter
from tests.support.gguf_models import SIZES, save_transformers_model, transformers_logits, write_gguf
from tests.support.models import stored

# Norms of Gemma's are one more in a file, and float32 has no room for all bits of that sum.
IN_BF16 = (*CASES, "gemma", "gemma2", "gemma3")


def source_of(folder: Path, name: str, **changes: Any) -> Path:
    """A random model; in float32, or in bf16 for those of `IN_BF16`."""
    if name in CASES:
        family, sizes = CASES[name]
        return random_model(folder / "model", family, **sizes, **changes)
    class_name, sizes = CONFIGS[name]
    config = {**({} if "n_embd" in sizes else SIZES), **sizes, **changes}
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


# transformers reads some GGUF files itself, with tables of its own. Changed is what these leave out: the
# scale of Gemma's queries, its scaled rotary embedding, and Falcon's epsilon, which they take for granted.
SECOND_SOURCE: dict[str, dict[str, Any]] = {
    "phi3": {},
    "gemma2": {"head_dim": 256, "query_pre_attn_scalar": 256},
    "gemma3": {"head_dim": 256, "query_pre_attn_scalar": 256, "rope_parameters": None},
    "falcon-7b": {"layer_norm_epsilon": 1e-5},
    "qwen3.5": {},
}


@pytest.mark.parametrize("name", SECOND_SOURCE)
def test_transformers_reads_the_same_model_from_the_file(tmp_path: Path, name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = source_of(tmp_path, name, **SECOND_SOURCE[name])
    gguf = run("to-gguf", source, "--type", "q8_0" if name == "phi3" else "f32", "-o", tmp_path / "m.gguf")
    back = run("from-gguf", gguf, "-o", tmp_path / "back", "--dtype", "f32")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=gguf.name, dtype=torch.float32
    )
    with torch.no_grad():
        theirs = model(torch.tensor([IDS])).logits[0].numpy()
    # Measured: 0 (phi3, qwen3.5), 3e-6 (gemma3: their epsilon is another decimal of the same float32).
    assert np.abs(transformers_logits(back, IDS) - theirs).max() < 1e-4 and theirs.std() > 0.3


def assert_same_model(one: Path, other: Path) -> None:
    """Two GGUF files must hold the same tensors, bit for bit, and say the same of their architecture."""
    with GGUFFile(one) as a, GGUFFile(other) as b:
        assert a.tensors == b.tensors
        arch = f"{a.kv['general.architecture'].value}."
        keys = [{k: e.value for k, e in f.kv.items() if k.startswith(arch)} for f in (a, b)]
        assert keys[0] == keys[1] and len(keys[0]) > 4
        for name, spec in a.specs.items():
            assert np.array_equal(a.read(name, 0, spec.rows), b.read(name, 0, spec.rows)), name


def written_again(source: Path, folder: Path) -> Path:
    """The folder that a model's GGUF is read back to, which must give the same GGUF again."""
    gguf = run("to-gguf", source, "--type", "f32", "-o", folder / "m.gguf")
    back = run("from-gguf", gguf, "-o", folder / "back", "--dtype", "f32")
    assert_same_model(gguf, run("to-gguf", back, "--type", "f32", "-o", folder / "again.gguf"))
    return back


ZOO = [
    "baichuan", "chatglm2", "deepseek-v1-moe", "deepseek-v2", "falcon-7b-style", "falcon-new-decoder",
    "grok-1", "grok-1-jax-names", "internlm2", "llama3", "mixtral", "openelm", "skywork", "t5", "yi",
]  # fmt: skip
# Named as in the port to Hugging Face; and a head that config.json ties but is another: it is one then.
ANOTHER_SPELLING = ("grok-1-jax-names", "t5")


@pytest.mark.parametrize("name", ZOO)
def test_recorded_checkpoints_come_back(assets: Path, tmp_path: Path, name: str) -> None:
    """Families with no class in transformers, too: the file that is written of what was read is the same."""
    source, folder = assets / "fixtures" / "zoo" / name, tmp_path / "model"
    shutil.copytree(source, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text())
    rows = config.get("padded_vocab_size") or config["vocab_size"]
    byte_tokenizer(rows).save(str(folder / "tokenizer.json"))
    back = written_again(folder, tmp_path)
    if name not in ANOTHER_SPELLING:
        assert qconvert("diff", back, folder, "--exit-code").code == 0


def test_the_head_of_baichuan_2_comes_back_with_rows_of_length_1(assets: Path, tmp_path: Path) -> None:
    """Its class divides by their lengths, which a file does not hold; as a Llama, it computes the same."""
    folder = tmp_path / "model"
    shutil.copytree(assets / "fixtures" / "zoo" / "baichuan", folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    config = json.loads((folder / "config.json").read_text()) | {"z_loss_weight": 0, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer(config["vocab_size"]).save(str(folder / "tokenizer.json"))
    gguf = run("to-gguf", folder, "--type", "f32", "-o", tmp_path / "m.gguf")
    back = run("from-gguf", gguf, "-o", tmp_path / "back", "--dtype", "f32")
    head = np.frombuffer(stored(back)["lm_head.weight"][2], np.float32)
    rows = head.reshape(config["vocab_size"], -1)
    assert np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-6


@pytest.mark.parametrize("version", T5)
def test_t5_comes_back(tmp_path: Path, version: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(**SIZES_T5, **T5[version])
    source = tmp_path / "t5"
    scatter(transformers.T5ForConditionalGeneration(config), 0.1).save_pretrained(source)
    add_tokenizer(source)
    back = written_again(source, tmp_path)
    ours, theirs = stored(back), stored(source)
    odd = [name for name in theirs if ours.pop(name) != theirs[name]]
    # The class saves the second as a tied model that scales no outputs; a file cannot tell it from one that
    # does, and is read as the usual one, with weights that make up for it.
    assert odd == ([] if version == "1.0" else ["decoder.final_layer_norm.weight"]) and not ours
    found = []
    for folder in (back, source):
        model = transformers.T5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            inputs = {"input_ids": torch.tensor([IDS]), "decoder_input_ids": torch.tensor([[0, *IDS[:7]]])}
            found.append(model(**inputs).logits.numpy())
    assert np.array_equal(*found)


def test_bert_comes_back_without_what_a_gguf_leaves_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    source = tmp_path / "bert"
    model = bert(source, "BertModel")
    back = written_again(source, tmp_path)
    assert not any("pooler" in name for name in stored(back))
    ran = qconvert("from-gguf", tmp_path / "m.gguf", "-o", tmp_path / "told")
    assert "no GGUF file holds these parts of a bert: pooler, head.bias" in ran.err
    found = transformers.AutoModel.from_pretrained(back, dtype=torch.float32)
    with torch.no_grad():
        ours, theirs = (each(torch.tensor([IDS])).last_hidden_state for each in (found, model))
    assert torch.equal(ours, theirs)
    text = "w3 w77 unknown W3"
    ids = [transformers.AutoTokenizer.from_pretrained(folder)(text).input_ids for folder in (back, source)]
    assert ids[0] == ids[1] and len(ids[0]) == 6


def test_layers_of_next_token_prediction_stay_behind(tmp_path: Path) -> None:
    """GLM-4.5 as llama.cpp's converter writes it: one more layer, which no other writes or reads here."""
    gguf = run("to-gguf", source_of(tmp_path, "glm4-moe"), "--type", "f32", "-o", tmp_path / "m.gguf")
    with GGUFFile(gguf) as file:
        kv = {**file.kv, "glm4moe.block_count": KV.u32("glm4moe.block_count", 3)}
        more = [
            replace(t, name=t.name.replace("blk.1.", "blk.2.")) for n, t in file.tensors.items() if ".1." in n
        ]
        tensors = [
            *file.tensors.values(),
            *more,
            GGUFTensor("blk.2.nextn.eh_proj.weight", GGMLType.F32, (64, 128)),
        ]
    whole = write_gguf(
        tmp_path / "whole.gguf",
        [*kv.values(), KV.u32("glm4moe.nextn_predict_layers", 1)],
        tensors,
    )
    ran = qconvert("from-gguf", whole, "-o", tmp_path / "back")
    assert ran.code == 0 and f"next-token prediction: {len(more) + 1} tensors are left out" in ran.err
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == 2
    ran = qconvert("from-gguf", write_gguf(tmp_path / "odd.gguf", list(kv.values()), tensors))
    assert ran.code == 1 and "blk.2.nextn.eh_proj.weight: not a tensor of GLM-4.5" in ran.err


@pytest.mark.parametrize("kind", ["default", "yarn"])
def test_gpt_oss_with_and_without_yarn(tmp_path: Path, kind: str) -> None:
    """The class has YaRN where config.json says nothing, and does not round where it begins."""
    yarn = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    rope = {"rope_type": kind, "rope_theta": 15000.0, **(yarn if kind == "yarn" else {})}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 16
    source = random_model(tmp_path / "model", "GptOss", **{**OSS, "rope_parameters": rope})
    back = written_again(source, tmp_path)
    assert np.array_equal(transformers_logits(back, IDS), transformers_logits(source, IDS))


# Blocks: what was quantized comes back as the numbers that gguf's own decoder gives


def turned(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of interleaved heads, neighbours apart: the first of each pair, then the second."""
    heads = [rows[i : i + head_dim] for i in range(0, len(rows), head_dim)]
    return np.concatenate([half for head in heads for half in (head[0::2], head[1::2])])


def latent(keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`kv_b` of the halves [heads, rank, rows] and [heads, rows, rank]."""
    return np.concatenate([part for k, v in zip(keys, values, strict=True) for part in (k.T, v)])


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5", "gemma2", "gpt-oss"])
def test_verify_against_the_source(tmp_path: Path, name: str) -> None:
    """Numbers that are computed on reading may differ as their blocks do, and those of formulas hardly."""
    source = source_of(tmp_path, name)
    gguf = run("to-gguf", source, "--type", "q8_0", "-o", tmp_path / "m.gguf")
    assert qconvert("verify", gguf, "--against", source).code == 0
    with GGUFFile(gguf) as file:
        norm, start = "output_norm.weight", file.headers[0].offsets["output_norm.weight"]
        rows = file.read(norm, 0, file.specs[norm].rows)
    with gguf.open("r+b") as opened:
        opened.seek(start)
        opened.write((rows * np.float32(1.001)).tobytes())
    ran = qconvert("verify", gguf, "--against", source)
    assert ran.code == 3 and "model.norm.weight: differs from the source" in ran.err


WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
BLOCKS: dict[str, tuple[str, dict[str, Any], dict[str, tuple[tuple[str, ...], Any]]]] = {
    "olmo": (
        "Olmo",
        {},
        {
            "model.layers.1.self_attn.q_proj.weight": (("attn_q",), lambda q: turned(q, 64)),
            "model.layers.1.mlp.up_proj.weight": (("ffn_up",), lambda up: up),
        },
    ),
    "phi3": (
        "Phi3",
        {"pad_token_id": 0},
        {"model.layers.0.mlp.gate_up_proj.weight": (("ffn_up",), lambda whole: whole)},
    ),
    "deepseek-v3": (
        "DeepseekV3",
        LATENT | {"qk_nope_head_dim": 256, "kv_lora_rank": 256, "moe_intermediate_size": 256},
        {
            "model.layers.1.self_attn.kv_b_proj.weight": (("attn_k_b", "attn_v_b"), latent),
            "model.layers.1.mlp.experts.3.down_proj.weight": (("ffn_down_exps",), lambda stack: stack[3]),
        },
    ),
    "gpt-oss": (
        "GptOss",
        OSS | {"intermediate_size": 256},
        {
            "model.layers.0.mlp.experts.gate_up_proj": (
                ("ffn_gate_exps", "ffn_up_exps"),
                lambda gate, up: np.stack([gate, up], axis=2).reshape(4, 512, 256).swapaxes(1, 2),
            )
        },
    ),
}


@pytest.mark.parametrize("file_type", ["q8_0", "q4_k_m"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_come_back_as_their_numbers(tmp_path: Path, name: str, file_type: str) -> None:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("transformers")
    family, changes, expected = BLOCKS[name]
    source = random_model(tmp_path / "model", family, **{**WIDE, **changes})
    file = run("to-gguf", source, "--type", file_type, "-o", tmp_path / "m.gguf")
    back = stored(run("from-gguf", file, "-o", tmp_path / "back", "--dtype", "f32"))
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}

    def numbers(name: str) -> np.ndarray:
        found: np.ndarray = gguf.dequantize(tensors[name].data, tensors[name].tensor_type)
        return found

    quantized = 0
    for ours, (parts, whole) in expected.items():
        layer = ours.split("layers.")[1][0]
        names = [f"blk.{layer}.{part}.weight" for part in parts]
        quantized += sum(tensors[each].tensor_type.name not in ("F32", "F16") for each in names)
        want = whole(*map(numbers, names))
        assert back[ours][1] == want.shape
        assert np.array_equal(np.frombuffer(back[ours][2], np.float32).reshape(want.shape), want), ours
    assert quantized >= len(expected)
