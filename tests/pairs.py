"""Every layout to every layout: small sources, what `qconvert convert` makes of each, and the table of it.

`python tests/pairs.py` writes the table into docs/reference/layouts.md.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from qconvert.core.layout_traits import LayoutTraits  # noqa: E402
from qconvert.core.schemes import Scheme  # noqa: E402
from qconvert.formats.layouts import registry  # noqa: E402
from tests.support.commands import made, qconvert  # noqa: E402
from tests.support.foreign import Weight, weights  # noqa: E402
from tests.support.models import byte_tokenizer, tiny, write_file  # noqa: E402

PAGE = ROOT / "docs" / "reference" / "layouts.md"
START, END = "<!-- pairs -->\n", "\n<!-- end of pairs -->"
Q = "model.layers.0.self_attn.q_proj"
# What a cell says beside "exact" and a number of steps.
NEW, AGAIN, PARTLY, NUMBERS, NO = "new", "again", "in part", "numbers", "no"


def targets() -> dict[str, str]:
    """The columns of the table: every layout, and the scheme of plain weights where they need one."""
    schemes = {traits.name: _scheme(traits) for traits in map(registry.traits_of, registry.written())}
    return {**schemes, "gguf": "", "bf16": ""}


def _scheme(traits: LayoutTraits) -> str:
    if traits.default_codebook or traits.integers is None:
        return ""
    size = next(iter(traits.integers.group_sizes or ()), None if traits.integers.group_sizes == () else 128)
    return Scheme(traits.integers.nearest(4), size).label


def gpt_oss(folder: Path, seed: int = 0) -> Path:
    """A random model of gpt-oss's, bf16, its experts turned and gate and up by turns."""
    random, hidden, experts, heads = np.random.default_rng(seed), 64, 3, 2
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "head_dim": 32,
        "hidden_size": hidden,
        "intermediate_size": hidden,
        "layer_types": ["sliding_attention", "full_attention"],
        "max_position_embeddings": 128,
        "num_attention_heads": heads,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_key_value_heads": heads,
        "num_local_experts": experts,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 128,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 320,
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (320, hidden),
        "lm_head.weight": (320, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in ("model.layers.0.", "model.layers.1."):
        shapes |= _gpt_oss_layer(layer, hidden, experts, heads)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    arrays = {name: random.standard_normal(shape, np.float32) * 0.1 for name, shape in shapes.items()}
    write_file(folder / "model.safetensors", arrays)
    return folder


def _gpt_oss_layer(layer: str, hidden: int, experts: int, heads: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
        f"{layer}self_attn.sinks": (heads,),
        f"{layer}mlp.router.weight": (experts, hidden),
        f"{layer}mlp.router.bias": (experts,),
        f"{layer}mlp.experts.gate_up_proj": (experts, hidden, 2 * hidden),
        f"{layer}mlp.experts.gate_up_proj_bias": (experts, 2 * hidden),
        f"{layer}mlp.experts.down_proj": (experts, hidden, hidden),
        f"{layer}mlp.experts.down_proj_bias": (experts, hidden),
    }
    for part in "qkvo":
        shapes[f"{layer}self_attn.{part}_proj.weight"] = (hidden, hidden)
        shapes[f"{layer}self_attn.{part}_proj.bias"] = (hidden,)
    return shapes


def _dense(folder: Path) -> Path:
    return tiny(folder, "qwen3", num_hidden_layers=1)


def _converted(layout: str, scheme: str, start: Callable[[Path], Path] = _dense) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        asked = ("--scheme", scheme) if scheme else ()
        return made("convert", start(folder / "m"), "--to", layout, *asked, "-o", folder / "q")

    return make


def _gguf(kind: str, *, pure: bool = True) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        model = tiny(folder / "m", "qwen3", num_hidden_layers=1, intermediate_size=384 if pure else 512)
        mixture = ("--pure",) if pure else ()
        return made("to-gguf", model, "--type", kind, *mixture, "-o", folder / "model.gguf")

    return make


def _act_order(folder: Path) -> Path:
    """As GPTQ writes it with desc_act: a group of its own choice for every column."""
    out = _converted("gptq", "int4-g128")(folder)
    arrays = load_file(out / "model.safetensors")
    for name in arrays:
        if name.endswith("g_idx"):
            order = np.random.default_rng(0).permutation(len(arrays[name]))
            arrays[name] = arrays[name][torch.from_numpy(order)]
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    return out


def _mlx_own(folder: Path) -> Path:
    """As mlx quantizes: mins that are no whole number of steps."""
    import mlx.core as mx

    out = _converted("mlx", "int4-asym-g64")(folder)
    file = str(out / "model.safetensors")
    plain, arrays = mx.load(str(folder / "m" / "model.safetensors")), mx.load(file)
    for name in [name for name in arrays if name.endswith(".scales")]:
        base = name.removesuffix(".scales")
        parts = mx.quantize(plain[f"{base}.weight"], group_size=64, bits=4)
        arrays |= dict(zip((f"{base}.weight", name, f"{base}.biases"), parts, strict=True))
    mx.save_safetensors(file, arrays, {"format": "mlx"})
    return out


def _torchao(folder: Path) -> Path:
    """As torchao's Int8Tensor is stored."""
    out = _converted("int-quantized", "int8-channel")(folder)
    before = load_file(out / "model.safetensors")
    arrays: dict[str, torch.Tensor] = {}
    for name, array in before.items():
        base = name.removesuffix("_scale").removesuffix(".weight")
        codes = f"{base}.weight_scale" in before
        if name.endswith("_scale"):
            arrays[f"{base}._weight_scale"] = array
            arrays[f"{base}._weight_zero_point"] = (array * 0).char()
        else:
            arrays[f"{base}._weight_qdata" if codes else name] = array
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "torchao"}
    (out / "config.json").write_text(json.dumps(config))
    (out / "qconvert.json").unlink()
    return out


def _fbgemm(folder: Path) -> Path:
    """As transformers saves FBGEMM's linears: the arrays of compressed-tensors, scales in float32."""
    out = _converted("modelopt", "fp8")(folder)
    arrays = load_file(out / "model.safetensors")
    arrays = {n: a[:, None] if n.endswith("_scale") else a for n, a in arrays.items()}
    save_file(arrays, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    (out / "config.json").write_text(json.dumps(config))
    for beside in ("qconvert.json", "hf_quant_config.json"):
        (out / beside).unlink()
    return out


def _nvfp4_gguf(folder: Path) -> Path:
    codes = _converted("compressed-tensors", "nvfp4")(folder)
    return made("convert", codes, "--to", "gguf", "-o", folder / "model.gguf")


def _oss(layout: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        first = made("convert", gpt_oss(folder / "m"), "--to", "mxfp4", "-o", folder / "own")
        out = folder / ("q.gguf" if layout == "gguf" else "q")
        return first if layout == "mxfp4" else made("convert", first, "--to", layout, "-o", out)

    return make


# The rows of the table.
SOURCES: dict[str, Callable[[Path], Path]] = {
    "bf16": _dense,
    "compressed-tensors int4": _converted("compressed-tensors", "int4-g128"),
    "compressed-tensors int4 asym": _converted("compressed-tensors", "int4-asym-g128"),
    "compressed-tensors int8 per row": _converted("int-quantized", "int8-channel"),
    "compressed-tensors fp8 per row": _converted("compressed-tensors", "fp8-channel"),
    "compressed-tensors fp8 per tensor": _converted("compressed-tensors", "fp8-tensor"),
    "compressed-tensors nvfp4": _converted("compressed-tensors", "nvfp4"),
    "fp8, blocks of 128": _converted("fp8", ""),
    "fbgemm fp8": _fbgemm,
    "modelopt fp8 per row": _converted("modelopt", "fp8"),
    "modelopt nvfp4": _converted("modelopt", "nvfp4"),
    "gptq": _converted("gptq", "int4-g128"),
    "gptq_v2 asym": _converted("gptq_v2", "int4-asym-g128"),
    "gptq, activation order": _act_order,
    "awq": _converted("awq", "int4-asym-g128"),
    "auto-round": _converted("auto-round", "int4-g128"),
    "mlx affine int4": _mlx_own,
    "mlx nvfp4": _converted("mlx", "nvfp4"),
    "bitsandbytes nf4, nested": _converted("bitsandbytes", "nf4-nested"),
    "bitsandbytes int8": _converted("bitsandbytes", "int8"),
    "torchao int8": _torchao,
    "gguf q4_0": _gguf("q4_0"),
    "gguf q4_1": _gguf("q4_1"),
    "gguf q4_k": _gguf("q4_k"),
    "gguf Q4_K_M (q4_k, q6_k)": _gguf("q4_k_m", pure=False),
    "gguf Q5_K_M (q5_k, q6_k)": _gguf("q5_k_m", pure=False),
    "gguf IQ4_XS (iq4_xs, q5_k, q6_k)": _gguf("iq4_xs", pure=False),
    "gguf nvfp4": _nvfp4_gguf,
    "gpt-oss mxfp4": _oss("mxfp4"),
    "compressed-tensors mxfp4": _oss("compressed-tensors"),
    "mlx mxfp4": _oss("mlx"),
    "gguf mxfp4": _oss("gguf"),
}


MIXTURES = tuple(name for name in SOURCES if name.endswith(")"))
"""Those of several encodings, of which one layout may keep some."""


@dataclass(frozen=True)
class Found:
    """What became of a pair: its cell in the table, and the output, None where there is none."""

    cell: str
    out: Path | None = None
    steps: float = 0.0


def convert(source: Path, row: str, target: str, out: Path, *, every: bool = True) -> Found:
    """Convert as a user would; where that is refused, again with the flag if the hint names it.

    Without `every`, weights are quantized again for one target in three only, another one in each row, but
    for mixtures.
    """
    out = out.with_suffix(".gguf") if target == "gguf" else out
    scheme = ("--scheme", targets()[target]) if row == "bf16" and targets()[target] else ()
    asked = ("convert", source, "--to", target, *scheme, "-o", out, "--json")
    ran = qconvert(*asked)
    hint = ran.json["error"]["hint"] if ran.code else ""
    again = "--allow-requantize" in hint and "other models" not in hint
    number = [*SOURCES].index(row) + [*targets()].index(target)
    if again and not every and number % 3 and "accepts that" not in hint and row not in MIXTURES:
        return Found(AGAIN)
    if again:
        ran = qconvert(*asked, "--allow-requantize")
        if ran.code and "--scheme" in ran.json["error"]["hint"]:  # one for all the tensors of a mixture
            ran = qconvert(*asked, "--allow-requantize", "--scheme", targets()[target])
        assert ran.code == 0, f"{row} to {target}: the flag of the hint does not help: {ran.out}"
    if ran.code != 0:
        assert ran.json["error"]["fact"] and ran.json["error"]["hint"] and not out.exists()
        return Found(NO)
    kinds, steps, keeps = _certificates(out, ran.json)
    assert again or "requantized" not in kinds
    if "requantized" in kinds:
        return Found(PARTLY if keeps and row in MIXTURES else AGAIN, out)
    if again:
        return Found(f"{steps:.1g} steps, asked", out, steps)
    if "quantized" in kinds:
        return Found(NEW, out)
    if target == "bf16":
        return Found("exact" if kinds == {"exact"} else NUMBERS, out)
    return Found(f"{steps:.1g} steps" if steps else "exact", out, steps)


def _certificates(out: Path, report: Any) -> tuple[set[str], float, bool]:
    """The kinds of the certificates of an output, the most steps that one names, whether codes are kept."""
    if out.is_file():
        moved = [float(steps) for steps in report["kept"].values() if steps != "exact"]
        return set(report["certificates"]), max(moved, default=0.0), bool(report["kept"])
    entries = json.loads((out / "qconvert.json").read_text())["tensors"].values()
    found = [entry["certificate"] for entry in entries]
    keeps = any(
        entry["certificate"]["kind"] in ("exact", "measured") and entry["form"] not in ("bf16", "f16", "f32")
        for entry in entries
    )
    steps = max(float(entry.get("max_steps", 0)) for entry in found)
    return {entry["kind"] for entry in found}, steps, keeps


def distance(before: Weight, after: Weight) -> float:
    """The largest distance of two weights in steps of the grid of either that has one."""
    gaps = np.abs(after[0] - before[0])
    steps = np.abs(before[1] if np.isfinite(before[1]).all() and before[1].all() else after[1])
    return float(np.divide(gaps, steps, out=np.where(gaps > 0, np.inf, 0.0), where=steps > 0).max())


def check(found: Found, source: Path) -> None:
    """Hold what the certificate says against numbers that other readers find on both sides."""
    assert found.out is not None
    ran = qconvert("verify", found.out, "--against", source)
    assert ran.code == 0, ran.err
    before, after = weights(source), weights(found.out)
    common = [name for name in before if name in after and "_proj" in name]
    assert len(common) >= 7
    if found.cell == "exact":
        for name in common:
            a, b = (side[name][0].astype(np.float32) for side in (before, after))
            np.testing.assert_array_equal(a, b, err_msg=name)
    elif found.steps:
        most = max(distance(before[name], after[name]) for name in common)
        assert 0.5 * found.steps <= most <= 1.01 * found.steps + 2**-15, (most, found.steps)
    else:
        worst = 2.0**-6 if found.cell == NUMBERS else 0.6
        for name in common:
            gap = np.square(after[name][0] - before[name][0]).sum()
            assert gap <= worst**2 * np.square(before[name][0]).sum(), name


def row(name: str, folder: Path, *, every: bool = True) -> str:
    """A line of the table, from conversions in an empty folder that are held to their claims."""
    source = SOURCES[name](folder / "source")
    cells = []
    for target in targets():
        found = convert(source, name, target, folder / target, every=every)
        if found.out is not None:
            check(found, source)
            (shutil.rmtree if found.out.is_dir() else Path.unlink)(found.out)
        cells.append(found.cell)
    return f"| {name} | {' | '.join(cells)} |"


def head() -> str:
    """The first two lines of the table."""
    return f"| from | {' | '.join(targets())} |\n|---{'|---' * len(targets())}|"


def in_docs() -> list[str]:
    """The lines of the table in docs/reference/layouts.md."""
    return PAGE.read_text(encoding="utf-8").split(START)[1].split(END)[0].splitlines()


def rewrite() -> None:
    """Make the table anew."""
    lines = [head()]
    for name in SOURCES:
        with tempfile.TemporaryDirectory() as folder:
            lines.append(row(name, Path(folder)))
            print(lines[-1], flush=True)
    before, rest = PAGE.read_text(encoding="utf-8").split(START)
    PAGE.write_text(
        f"{before}{START}{chr(10).join(lines)}{END}{rest.split(END.lstrip())[1]}", encoding="utf-8"
    )


if __name__ == "__main__":
    rewrite()
