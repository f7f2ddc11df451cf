"""Builds a config.json from the metadata of a GGUF model file, with the declarations read backwards.

Pure. Every number that decides what the model computes comes from a key or from a tensor's shape; a key that
the model needs and the file lacks is an error that names it. What llama.cpp's graphs hard-wire (norms of
expert weights, activations) is written out, as the declaration's checks state it.
"""

from __future__ import annotations

import re
from math import isclose

from qconvert.core.dtypes import Json
from qconvert.core.ggml_types import KV, Scalar
from qconvert.errors import CorruptCheckpoint, UnsupportedModel, shown
from qconvert.models.families import FAMILIES
from qconvert.models.gguf.declaration import BothWays, Facts, GGUFModel
from qconvert.models.gguf.families import MODELS
from qconvert.models.gguf.keys import model_keys
from qconvert.models.gguf.metadata import Metadata
from qconvert.models.gguf.names import gguf_name
from qconvert.models.parameters import Family

_EMBEDDING = "token_embd.weight"
_SPECIAL = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))


def candidates(file: Metadata) -> tuple[str, ...]:
    """Returns the model types that llama.cpp runs in the graph of this file, more likely ones first.

    Raises UnsupportedModel for an undeclared architecture, and for one whose files hold products.
    """
    found = {n: model for n, model in MODELS.items() if isinstance(model, GGUFModel) and not model.products}
    same = tuple(name for name, model in found.items() if model.of_arch(file.arch))
    if not same:
        declared = (each for model in found.values() for each in (model, *model.variants))
        known = ", ".join(dict.fromkeys(each.arch for each in declared))
        raise UnsupportedModel(
            f"{file.file}: general.architecture is '{shown(file.arch)}', which is not read here",
            f"read: {known}",
        )
    return same


def config_of(model_type: str, file: Metadata) -> Json:
    """Returns the config.json of a file as a model of this type, one of its `candidates`.

    Raises CorruptCheckpoint naming a missing or invalid key, UnsupportedModel for a key that config.json has
    no equivalent of.
    """
    declared = MODELS[model_type]
    model = declared.of_arch(file.arch) if isinstance(declared, GGUFModel) else None
    assert model is not None, "one of the candidates"
    family = next(f for f in FAMILIES if model_type in f.model_types)
    if _EMBEDDING not in file.tensors:
        raise CorruptCheckpoint(f"{file.file}: {_EMBEDDING} is missing")
    read: Json = {}
    for check in model.checks:
        read |= check.read(file) if isinstance(check, BothWays) else {}
    for keys in (*model.keys, *model.late):
        read |= keys.read(file)
    if model.constants is not None:
        read |= model.constants.read(file)
    if "head_dim" in family.defaults:  # where a class has its own default, and llama.cpp this one
        read.setdefault("head_dim", file.head_size)
    # In this family's keys; a key of both names is kept.
    read = {"vocab_size": file.tensors[_EMBEDDING].shape[0], **read}
    names = {"num_hidden_layers": family.layers[0], **family.keys}
    # The class at the position of the type, where the family has as many.
    beside = len(family.classes) == len(family.model_types)
    special = {f"{name}_token_id": file.kv.get(f"tokenizer.ggml.{key}_token_id") for name, key in _SPECIAL}
    return {
        "architectures": [family.classes[family.model_types.index(model_type) if beside else 0]],
        "model_type": model_type,
        family.tied_by: "output.weight" not in file.tensors,
        **_biases(family, model, file),
        **{names.get(key, key): value for key, value in read.items()},
        **{key: read[key] for key, own in family.keys.items() if key in read and own in read},
        **{key: entry.value for key, entry in special.items() if entry and isinstance(entry.value, int)},
    }


def check_keys(facts: Facts, file: Metadata) -> tuple[str, ...]:
    """Returns the keys of a file that the declaration does not know.

    Raises UnsupportedModel naming a key whose value differs from that of a model of this config: it would be
    lost.
    """
    late = (entry for keys in facts.model.late for entry in keys(facts))
    known = {entry.key: entry for entry in (*model_keys(facts), *late)}
    beyond = file.count("nextn_predict_layers")
    if beyond:
        whole = facts.u32("block_count", facts.layers + beyond)
        known[whole.key] = whole
    for key, entry in known.items():
        stated = file.kv.get(key)
        if stated is not None and not _same(stated, entry):
            raise UnsupportedModel(
                f"{file.file}: {key} is {stated.value!r}, for which config.json has no key: as "
                f"{facts.architecture.config['model_type']} it would be {entry.value!r}",
                "keep this model as GGUF: its other keys tell llama.cpp what it is",
            )
    prefix = f"{file.arch}."
    return tuple(key for key in file.kv if key.startswith(prefix) and key not in known)


def _same(one: KV, other: KV) -> bool:
    a, b = one.value, other.value
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, tuple) or isinstance(b, tuple):  # one count for all layers, or one for each
        return set(a if isinstance(a, tuple) else (a,)) == set(b if isinstance(b, tuple) else (b,))
    return _equal(a, b)


def _equal(a: Scalar, b: Scalar) -> bool:
    return isclose(a, b, rel_tol=1e-6) if isinstance(a, float) and isinstance(b, float) else a == b


def _biases(family: Family, model: GGUFModel, file: Metadata) -> Json:
    first = {re.sub(r"(?<=blk\.)\d+(?=\.)", "0", name) for name in file.tensors}
    found: dict[str, bool] = {}
    for slot in family.slots:
        if isinstance(slot.bias, str):
            own, layer = slot.role.replace("{expert}.", ""), 0 if slot.per_layer else None
            wholes = (f.role for f in family.fusions if own in f.part_groups and f.role in model.whole)
            role = next(wholes, own)
            names = {gguf_name(role, layer, "bias", written) for written in model.written(role)}
            found[slot.bias] = found.get(slot.bias, False) or bool(names & first)
    return found
