"""Models with code of their own: the code is copied byte for byte, named, run by loaders and never here."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qconvert.checkpoint.open import open_checkpoint
from qconvert.core.dtypes import DType
from qconvert.formats.huggingface.folder import open_hf_folder
from qconvert.quant.dequantize import numbers
from tests.checkpoint.test_hub import Hub, ask
from tests.support.commands import made, qconvert
from tests.support.models import byte_tokenizer, write_file

CONFIGURATION = """
from transformers import PretrainedConfig


class TinyInternLM2Config(PretrainedConfig):
    model_type = "internlm2"
"""
MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_internlm2 import TinyInternLM2Config
from .norms import Norm


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv, self.size = c.num_attention_heads, c.num_key_value_heads, 32
        self.wqkv = nn.Linear(c.hidden_size, (self.heads + 2 * self.kv) * self.size, bias=False)
        self.wo = nn.Linear(self.heads * self.size, c.hidden_size, bias=False)

    def forward(self, x):
        batch, length, _ = x.shape
        groups = self.wqkv(x).view(batch, length, self.kv, self.heads // self.kv + 2, self.size)
        q = groups[..., :-2, :].flatten(2, 3).transpose(1, 2)
        k, v = groups[..., -2:, :].repeat_interleave(self.heads // self.kv, 2).unbind(3)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        made = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(made.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.w1 = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.w3 = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.w2 = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x):
        return self.w2(nn.functional.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention_norm, self.ffn_norm = Norm(c.hidden_size), Norm(c.hidden_size)
        self.attention, self.feed_forward = Attention(c), FeedForward(c)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = Norm(c.hidden_size)


class TinyInternLM2(PreTrainedModel):
    config_class = TinyInternLM2Config

    def __init__(self, config):
        super().__init__(config)
        self.model = Body(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **_):
        x = self.model.tok_embeddings(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.output(self.model.norm(x)))
"""
NORMS = """
import torch


class Norm(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x * (x.float().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)
"""
CODE = {"configuration_internlm2.py": CONFIGURATION, "modeling_internlm2.py": MODELING, "norms.py": NORMS}
CONFIG = {
    "architectures": ["InternLM2ForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_internlm2.TinyInternLM2Config",
        "AutoModelForCausalLM": "modeling_internlm2.TinyInternLM2",
    },
    "model_type": "internlm2",
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bias": False,
    "torch_dtype": "float32",
    "tie_word_embeddings": False,
}
LAYER = {
    "attention.wqkv": (256, 128), "attention.wo": (128, 128), "attention_norm": (128,), "ffn_norm": (128,),
    "feed_forward.w1": (256, 128), "feed_forward.w3": (256, 128), "feed_forward.w2": (128, 256),
}  # fmt: skip


def internlm2(folder: Path, **changes: Any) -> Path:
    """An InternLM2 of two layers with its code beside it, a script, and a pooling module."""
    rng = np.random.default_rng(7)
    shapes = {f"model.layers.{n}.{name}.weight": shape for n in range(2) for name, shape in LAYER.items()}
    shapes |= {"model.tok_embeddings.weight": (320, 128), "output.weight": (320, 128)}
    arrays = {n: (rng.standard_normal(s) * 0.05).astype(np.float32) for n, s in shapes.items()}
    folder.mkdir(parents=True)
    write_file(folder / "model.safetensors", arrays | {"model.norm.weight": np.ones(128, np.float32)})
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    for name, text in CODE.items():
        (folder / name).write_text(text)
    (folder / "tokenization_internlm2.py").write_text("raise SystemExit('this ran')\n")
    (folder / "train.py").write_text("raise SystemExit('this ran')\n")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return internlm2(tmp_path_factory.mktemp("own") / "internlm2")


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where transformers puts the code that it runs."""
    import transformers

    before = set(sys.modules)
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name in set(sys.modules) - before:
        if name.startswith("transformers_modules"):
            del sys.modules[name]


def test_the_code_travels_untouched_and_is_named(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = qconvert("quantize", model, "--bits", 4, "-o", out)
    assert ran.code == 0, ran.err
    copied = {path.name: path.read_bytes() for path in out.glob("*.py")}
    assert copied == {n: (model / n).read_bytes() for n in (*CODE, "tokenization_internlm2.py")}
    named = ", ".join(sorted(copied))
    assert f"the model's own code, copied as it is and never run: {named}\n" in ran.out
    assert "left out, for no config names it as the model's code: train.py\n" in ran.out
    card = (out / "README.md").read_text()
    assert "`modeling_internlm2.py`, `norms.py`" in card and "trust_remote_code=True" in card
    config = json.loads((out / "config.json").read_text())
    assert config["auto_map"] == CONFIG["auto_map"]


def test_a_gguf_says_that_it_leaves_the_code_out(model: Path) -> None:
    ran = qconvert("to-gguf", model, "--type", "q8_0", "--pre-tokenizer", "gpt-2", "--dry-run")
    named = "configuration_internlm2.py, modeling_internlm2.py, norms.py, tokenization_internlm2.py"
    assert ran.code == 0, ran.err
    assert ran.out.endswith(f"left out, for a GGUF holds no code of a model: {named}\n")


@pytest.mark.parametrize("name", ["modules.json", "tokenizer_config.json"])
def test_a_broken_file_beside_the_weights_names_no_code(model: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    (folder / name).write_text('{"auto_map": [')
    assert len(open_hf_folder(folder).sidecars.code) == 4


@pytest.mark.usefixtures("modules")
def test_transformers_runs_the_code_on_the_quantized_weights(model: Path, tmp_path: Path) -> None:
    """Held against the same class on the plain numbers that our decoder makes of the codes."""
    import torch
    import transformers

    out = made("quantize", model, "--bits", 4, "-o", tmp_path / "tiny_internlm2")
    load = transformers.AutoModelForCausalLM.from_pretrained
    quantized = load(out, dtype=torch.float32, trust_remote_code=True)
    assert type(quantized).__name__ == "TinyInternLM2"
    plain = load(
        made("dequantize", out, "--dtype", "f32", "-o", tmp_path / "plain"),
        dtype=torch.float32,
        trust_remote_code=True,
    )
    ids = torch.arange(40).view(1, 40) * 7 % 320
    with torch.no_grad():
        ours, theirs = plain(ids).logits, quantized(ids).logits
        source = load(model, dtype=torch.float32, trust_remote_code=True)(ids).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(source, theirs, rtol=1e-3, atol=1e-3)
    checkpoint = open_checkpoint(out)
    tensor = checkpoint.tensors["model.layers.1.attention.wqkv.weight"]
    rows_RI = numbers(checkpoint.reader.read(tensor, 0, tensor.rows), DType.F32).rows_RI
    stored = plain.model.layers[1].attention.wqkv.weight.detach().numpy()
    np.testing.assert_array_equal(rows_RI, stored)


def test_the_linter_says_who_needs_the_code(model: Path) -> None:
    asked = qconvert("check", model, "--for", "transformers", "--json").json
    assert asked["verdict"] == "loads only with" and asked["needs"] == ["trust_remote_code=True"]
    assert "modeling_internlm2.py" in qconvert("check", model, "--for", "vllm").out


def test_code_that_is_not_there_is_told(tmp_path: Path) -> None:
    folder = internlm2(tmp_path / "m")
    (folder / "modeling_internlm2.py").unlink()
    assert open_hf_folder(folder).sidecars.missing == ("modeling_internlm2.py",)
    assert "modeling_internlm2.py: auto_map names it" in qconvert("check", folder, "--for", "vllm").out


def test_declared_families_without_a_class_are_those_that_transformers_lacks() -> None:
    import transformers

    from qconvert.check.own_code import NO_CLASS

    assert not NO_CLASS & set(transformers.CONFIG_MAPPING.keys())


@pytest.mark.parametrize(
    "reference",
    ["other/repo--modeling.Model", "../modeling.Model", "a.b.Model", "/etc/passwd.x", "", 3, None],
)
def test_a_reference_that_leaves_the_folder_names_nothing(tmp_path: Path, reference: object) -> None:
    folder = internlm2(tmp_path / "deep" / "m", auto_map={"AutoModel": reference})
    (folder.parent / "modeling.py").write_text("")
    (folder / "modeling.py").write_text("")
    for name in CODE:
        (folder / name).unlink()
    found = open_hf_folder(folder).sidecars
    assert [path.name for path in found.code] == ["tokenization_internlm2.py"] and found.missing == ()


def test_imports_that_go_round_end(tmp_path: Path) -> None:
    folder = internlm2(tmp_path / "m")
    (folder / "norms.py").write_text("from .modeling_internlm2 import *\nfrom . import norms, other\n")
    (folder / "other.py").write_text("from .norms import x\nfrom .nothing import y\n")
    code = [path.name for path in open_hf_folder(folder).sidecars.code]
    assert code == sorted([*CODE, "other.py", "tokenization_internlm2.py"])


POOLING = {"word_embedding_dimension": 128, "pooling_mode_mean_tokens": True}
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "../elsewhere", "type": "sentence_transformers.models.Dense"},
]


def test_the_modules_of_a_sentence_transformer_travel(model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "config.json").write_text("{}")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING))
    (folder / "1_Pooling" / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modules.json").write_text(json.dumps(MODULES))
    (folder / "config_sentence_transformers.json").write_text("{}")
    ran = qconvert("quantize", folder, "--bits", 4, "-o", tmp_path / "out")
    assert ran.code == 0 and "modules of sentence-transformers, copied as they are: 1_Pooling\n" in ran.out
    made_of = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {"modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"} <= made_of
    assert not {name for name in made_of if name.endswith(".bin")} and not (tmp_path / "out.partial").exists()


def test_the_hub_gives_the_code_that_a_config_names(model: Path, tmp_path: Path) -> None:
    files = {path.name: path.read_bytes() for path in model.iterdir()}
    pooling = {"modules.json": json.dumps(MODULES).encode(), "1_Pooling/config.json": b"{}"}
    others = {"1_Pooling/pytorch_model.bin": b"pickle", "onnx/model.json": b"{}", "elsewhere/x.json": b"{}"}
    plain = files | {"config.json": json.dumps({**CONFIG, "auto_map": None}).encode()}
    with Hub() as server:
        server.repos = {"org/own": files | pooling | others, "org/plain": plain}
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        (own, *_), (without, *_) = ask(server.url, tmp_path, ("org/own", {}), ("org/plain", {}))
        server.shutdown()
    found = {str(path.relative_to(own)) for path in Path(own).rglob("*") if path.is_file()}
    assert found == {*files, *pooling}
    assert not list(Path(without).glob("*.py"))
    assert [path.name for path in open_hf_folder(Path(own)).sidecars.code] == [
        *CODE,
        "tokenization_internlm2.py",
    ]
