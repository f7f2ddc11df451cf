"""Declares how llama.cpp stores and runs each model family: one declaration per model type.

To add a family that llama.cpp runs, write a `GGUFModel` in a module here and put it into that module's
`MODELS` under its model_type. It consists of (see `models.gguf.declaration`):

- `arch`, and its `keys` in the converter's order, from the functions of `models.gguf.keys` (`decoder` has the
  usual order) and functions of its own;
- `roles`: how a role of the family is written where it is not a copy under the name of the shared table
  (`models.gguf.names`). `Written("ffn_up")` gives it a name, `Written(change="plus_one")` changes
  its weights, several make several tensors of it, `NOT_WRITTEN` leaves it out;
- `whole`: fused roles that stay fused, all q before all k before all v;
- `head`, `constants`, `special` and `checks`: the head of a tied model, tensors that come from
  config.json, special tokens, and config values that llama.cpp's graph does not compute.

A declaration is also read backwards (`models.gguf.recognize`): `read_by` gives the config.json entries of a
`Keys` (`derived` where there are none), `implying` those that a check ensures, and rows are restored by the
same records (`models.gguf.tensors`). Of types with one graph, a file is read as the first whose tensors
match.

A new row transform is a `TransformKind`, an operation in `ops.rows`, a line in `plan.gguf.tensors`, and its
inverse in `formats.layouts.gguf`; one without an inverse has its reason in `LOST`. A type without a graph in
llama.cpp is a `NoGraph` with a sentence for the user.

Sources of all declarations: the classes of llama.cpp's converter (conversion/*.py) and the loaders and
graphs in src/models/*.cpp at commit 0c1e57098; where the two disagree with the family's own class,
the class is right and the declaration states the difference.
"""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.dtypes import Json
from qconvert.errors import UnsupportedModel
from qconvert.models.architecture import Architecture
from qconvert.models.family_of import model_type_of
from qconvert.models.gguf.declaration import Facts, GGUFModel, NoGraph, refuse_other_models
from qconvert.models.gguf.families import (
    deepseek,
    deepseek_sparse,
    deepseek_v4,
    encoders,
    encoders_newer,
    falcon_h1,
    fused,
    gemma,
    gemma3n,
    gemma4,
    gpt,
    granite,
    kimi_linear,
    layer_norms,
    lfm2,
    llama,
    llama_relatives,
    mimo,
    minicpm,
    minimax,
    nemotron,
    others,
    qwen,
    qwen_hybrid,
    seeing,
    sparse_relatives,
    state_space,
    step,
)
from qconvert.models.gguf.families.tower_models import tower_model

MODELS: Mapping[str, GGUFModel | NoGraph] = {
    **qwen.MODELS,
    **qwen_hybrid.MODELS,
    **llama.MODELS,
    **llama_relatives.MODELS,
    **granite.MODELS,
    **sparse_relatives.MODELS,
    **layer_norms.MODELS,
    **lfm2.MODELS,
    **falcon_h1.MODELS,
    **state_space.MODELS,
    **fused.MODELS,
    **gemma.MODELS,
    **gemma3n.MODELS,
    **gemma4.MODELS,
    **deepseek.MODELS,
    **deepseek_sparse.MODELS,
    **minicpm.MODELS,
    **mimo.MODELS,
    **deepseek_v4.MODELS,
    **kimi_linear.MODELS,
    **minimax.MODELS,
    **nemotron.MODELS,
    **gpt.MODELS,
    **encoders.MODELS,
    **encoders_newer.MODELS,
    **others.MODELS,
    **seeing.MODELS,
    **step.MODELS,
}


def find_model(config: Json) -> GGUFModel | None:
    """Returns llama.cpp's declaration of the model of this config, None if it has none."""
    found = MODELS.get(str(model_type_of(config)))
    if isinstance(found, GGUFModel) and found.variant is not None:
        return found.variant(config)
    return found if isinstance(found, GGUFModel) else None


def gguf_model(config: Json) -> GGUFModel:
    """Returns llama.cpp's declaration of the model of this config. Raises UnsupportedModel without one."""
    found = find_model(config)
    if found is not None:
        return found
    model_type = model_type_of(config)
    known = MODELS.get(str(model_type))
    if isinstance(known, NoGraph):
        raise UnsupportedModel(
            f"config.json: model_type {model_type!r} cannot be written as GGUF: {known}",
            "`qconvert quantize` writes it as safetensors",
        )
    raise UnsupportedModel(
        f"config.json: model_type {model_type!r} cannot be written as GGUF here",
        f"known: {', '.join(name for name, model in MODELS.items() if isinstance(model, GGUFModel))}",
    )


def remarks_on(facts: Facts) -> tuple[str, ...]:
    """Returns what the user should know about the file of a model."""
    said = (remark(facts) for remark in facts.model.remarks)
    return tuple(f"config.json: {sentence}" for sentence in said if sentence is not None)


def facts_of(architecture: Architecture) -> Facts:
    """Returns the facts that a model's declaration reads.

    Raises UnsupportedModel for a model that llama.cpp does not run, or would run as another model.
    """
    model = tower_model(architecture.family.name, architecture.config)
    facts = Facts(model or gguf_model(architecture.config), architecture)
    refuse_other_models(facts)
    return facts
