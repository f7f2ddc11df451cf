"""Declares the language models inside SmolVLM, Idefics3 and InternVL: those of their own families."""

from __future__ import annotations

from dataclasses import replace

from qconvert.core.dtypes import Json
from qconvert.models.families.common import language_config
from qconvert.models.gguf.declaration import GGUFModel
from qconvert.models.gguf.families.llama import LLAMA
from qconvert.models.gguf.families.qwen import QWEN2, QWEN3

_INSIDE = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}


def _language_model(config: Json) -> GGUFModel:
    inner = str((language_config(config) or {}).get("model_type"))
    return _INSIDE.get(inner, QWEN2)


INTERNVL = replace(QWEN2, variant=_language_model)

MODELS = {"smolvlm": LLAMA, "idefics3": LLAMA, "internvl": INTERNVL, "internvl_chat": INTERNVL}
