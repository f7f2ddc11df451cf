"""Makes a mixture of experts of the embedded model, so that clients can be tried on one that reads text.

An expert holds some of a layer's channels, and its down projection counts as often as there are experts:
where all are chosen alike, the mixture computes what the dense layer does. The router prefers some a little.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

EXPERTS = 6
_SIDECARS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_PARTS = ("gate_proj", "up_proj", "down_proj")


def mixture(model: Path, out: Path) -> None:
    """Write a Qwen3-MoE of six experts, all of them chosen, from a dense Qwen3 folder."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    dense = load_file(model / "model.safetensors")
    tensors = {name: weight for name, weight in dense.items() if ".mlp." not in name}
    draw = torch.Generator().manual_seed(0)
    for layer in range(config["num_hidden_layers"]):
        mlp = f"model.layers.{layer}.mlp"
        router_EH = 0.2 * torch.randn(EXPERTS, config["hidden_size"], generator=draw)
        tensors[f"{mlp}.gate.weight"] = router_EH.to(torch.bfloat16)
        for name in _PARTS:
            whole = dense[f"{mlp}.{name}.weight"]
            down = name == "down_proj"
            for expert, part in enumerate(whole.chunk(EXPERTS, dim=1 if down else 0)):
                grown = part * EXPERTS if down else part
                tensors[f"{mlp}.experts.{expert}.{name}.weight"] = grown.contiguous()
    out.mkdir(parents=True)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    changes = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "moe_intermediate_size": config["intermediate_size"] // EXPERTS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (out / "config.json").write_text(json.dumps(config | changes, indent=2) + "\n", encoding="utf-8")
    for name in _SIDECARS:
        shutil.copyfile(model / name, out / name)
