"""Opens a Hugging Face folder as one source of tensors: config.json, one or many shards, their index.

Decides which files make up a checkpoint and checks that they agree. The invariant: every tensor of `specs` is
in exactly one open file, inside its bounds; index files cannot point outside their folder; only headers are
read on opening, and nothing is ever unpickled or executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

import numpy as np

from qconvert.core.dtypes import Json, TensorSpec
from qconvert.core.protocols import Sidecars
from qconvert.errors import CorruptCheckpoint, NotDownloaded, QConvertError, UnsupportedModel, shown
from qconvert.formats.huggingface.safetensors_file import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsFile,
    SafetensorsHeader,
)
from qconvert.formats.huggingface.shard_index import (
    ShardedSpecs,
    ShardIndex,
    locate,
    read_index,
    require_shards,
)
from qconvert.formats.huggingface.sidecars import sidecars_of
from qconvert.formats.huggingface.unlisted_files import OWN_LAYOUT, files_without_index
from qconvert.formats.io.byte_source import ByteSource
from qconvert.formats.io.local_file import octets
from qconvert.formats.io.strict_json import read_json_object
from qconvert.formats.layouts.config_checks import SETTINGS_KEY

CONFIG_FILE = "config.json"
README_FILE = "README.md"
# Where tools of NVIDIA repeat the quantization settings, or alone have them.
QUANTIZATION_FILE = "hf_quant_config.json"
_ADAPTER = "adapter_config.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class HFCheckpoint:
    """An open checkpoint in Hugging Face layout (a `core.protocols.Source`).

    `specs` covers all files, in the order of their bytes. `index_sha256` is the hash of the shard index, if
    any; `readme` is the model card. `warnings` list what was odd and tolerated.
    """

    path: Path
    config: Json
    specs: Mapping[str, TensorSpec]
    sidecars: Sidecars
    readme: Path | None
    warnings: tuple[str, ...]
    index_sha256: str | None
    shards: tuple[SafetensorsFile, ...]
    homes: Mapping[str, int]

    def __repr__(self) -> str:
        return f"HFCheckpoint {self.path}: {len(self.specs):,} arrays in {len(self.shards):,} weight files"

    @property
    def has_weights(self) -> bool:
        """True if rows can be read; False for a bare config.json and where headers alone were fetched."""
        return bool(self.shards) and all(shard.source.has_bytes for shard in self.shards)

    @property
    def files(self) -> tuple[SafetensorsHeader, ...]:
        """The checked header of each weight file: path, size, hash, metadata."""
        return tuple(shard.header for shard in self.shards)

    @property
    def metadata(self) -> dict[str, str]:
        """The headers' `__metadata__` in one mapping.

        `format` names the framework that wrote the file; for tensors that shared memory when they were saved,
        the dropped name maps to the kept one (safetensors.torch.save_model).
        """
        return {key: text for header in self.files for key, text in header.metadata.items()}

    def source_offset(self, name: str) -> tuple[int, int]:
        """Returns the index into `files`, and the offset, of a tensor's bytes."""
        home = self.homes[name]
        return home, self.shards[home].header.specs.offset(name)

    def read(self, name: str, start: int, stop: int, *, columns: tuple[int, int] | None = None) -> np.ndarray:
        """Returns rows [start, stop) of a tensor (see `SafetensorsFile.read`); thread-safe."""
        return self._shard(name).read(name, start, stop, columns=columns)

    def _shard(self, name: str) -> SafetensorsFile:
        """The file that a tensor is in; NotDownloaded where only its header is here."""
        shard = self.shards[self.homes[name]]
        if not shard.source.has_bytes:
            raise NotDownloaded(
                f"{name}: its bytes are not here, only its header",
                "download the weights, with `hf download` or by converting the model",
            )
        return shard

    def read_stacked(self, kinds: Sequence[Sequence[str]]) -> list[np.ndarray]:
        """Returns whole tensors, those of one kind (element type and shape) one below the other.

        What lies side by side is read in one call; thread-safe.
        """
        stacks: list[np.ndarray] = []
        parts: list[list[tuple[int, memoryview]]] = [[] for _ in self.shards]
        for names in kinds:
            form = self._shard(names[0]).header.specs.place(names[0])[1]
            stacks.append(np.empty((len(names) * form.rows, form.width), form.carrier))
            data, nbytes = octets(stacks[-1]), form.rows * form.width * form.item_bytes
            for number, name in enumerate(names):
                home, offset = self.source_offset(name)
                parts[home].append((offset, data[number * nbytes : (number + 1) * nbytes]))
        for shard, some in zip(self.shards, parts, strict=True):
            shard.source.read_all(sorted(some, key=itemgetter(0)))
        return stacks

    def close(self) -> None:
        for shard in self.shards:
            shard.close()

    def __enter__(self) -> HFCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_hf_folder(path: Path, remote: Mapping[str, ByteSource] | None = None) -> HFCheckpoint:
    """Opens a checkpoint folder, or one file of it: config.json, the index, a .safetensors file.

    A JSON file of another name is read as a config without weights. `remote` are weight files of the folder,
    by name, that are not on this disk. Raises CorruptCheckpoint where files are damaged or
    disagree, UnsupportedModel for other kinds of checkpoint, each with a hint.
    """
    folder = path.parent if path.name in (CONFIG_FILE, INDEX_FILE) else path
    if folder.is_dir():
        weights = _weights_in(folder, remote or {})
        return _assemble(folder, _config(folder), weights)
    if not path.exists():
        raise QConvertError(f"{path}: no such file or folder", "check the path")
    if path.suffix == ".json":
        return _assemble(path.parent, _config_named(path), _Weights())
    if path.suffix == ".safetensors":
        if _is_there(path.parent / CONFIG_FILE):
            return _assemble(path.parent, _config(path.parent), _Weights((path,)))
        no_config = f"{shown(path.name)}: no {CONFIG_FILE} beside it"
        return _assemble(path.parent, {}, _Weights((path,), warnings=(no_config,)))
    raise UnsupportedModel(
        f"{shown(path.name)}: neither a safetensors nor a GGUF file",
        f"name a folder with {CONFIG_FILE} and safetensors",
    )


def open_config(path: Path) -> HFCheckpoint:
    """Opens a config.json, or the folder of one, without its weights, which may be elsewhere."""
    if path.is_file() and path.name not in (CONFIG_FILE, INDEX_FILE):
        return _assemble(path.parent, _config_named(path), _Weights())
    folder = path if path.is_dir() else path.parent
    return _assemble(folder, _config(folder), _Weights())


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the files that hold a folder's weights, present or not; () for none.

    model.safetensors if it exists, as in transformers; else the shards of the index.
    """
    if _is_there(folder / SINGLE_FILE):
        return (folder / SINGLE_FILE,)
    return read_index(folder / INDEX_FILE).files if _is_there(folder / INDEX_FILE) else ()


@dataclass(frozen=True, slots=True)
class _Weights:
    """The files to open, the index that lists them, warnings, and where files that are not here come from."""

    files: tuple[Path, ...] = ()
    index: ShardIndex | None = None
    warnings: tuple[str, ...] = ()
    remote: Mapping[str, ByteSource] = field(default_factory=dict)


def _weights_in(folder: Path, remote: Mapping[str, ByteSource]) -> _Weights:
    single, index_file = folder / SINGLE_FILE, folder / INDEX_FILE
    index = read_index(index_file) if _is_there(index_file) else None
    has_single = single.name in remote or _is_there(single)
    if has_single and (index is None or index.files != (single,)):
        both = f"{SINGLE_FILE} and {INDEX_FILE} are both there: {SINGLE_FILE} is read, as in transformers"
        return _Weights((single,), warnings=(both,) if index else (), remote=remote)
    if index:
        require_shards(index, remote)
        return _Weights(index.files, index, remote=remote)
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    unlisted = files_without_index(names)
    if unlisted and CONFIG_FILE in names and _ADAPTER not in names:
        said = f"no {INDEX_FILE}: {shown(unlisted[0])}"
        said += f" and the {len(unlisted) - 1} beside it are read" if len(unlisted) > 1 else " is read"
        return _Weights(tuple(folder / name for name in unlisted), warnings=(said,))
    _refuse_other_weights(folder, names)
    return _Weights()


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()  # a dangling link is an error, not an absence


def _config_named(path: Path) -> Json:
    """Reads a config under a name of its own, which says what model it is of."""
    config = _settings_on_top(read_json_object(path))
    if "model_type" not in config and "architectures" not in config:
        fact = f"{shown(path.name)}: not the config of a model, which has a model_type"
        raise CorruptCheckpoint(fact, f"name {CONFIG_FILE}, or its folder")
    return config


def _config(folder: Path) -> Json:
    if not _is_there(folder / CONFIG_FILE):
        raise CorruptCheckpoint(f"{folder}: has no {CONFIG_FILE}", "copy it from the model's source")
    config = _settings_on_top(read_json_object(folder / CONFIG_FILE))
    if SETTINGS_KEY in config or not _is_there(folder / QUANTIZATION_FILE):
        return config
    return config | {SETTINGS_KEY: read_json_object(folder / QUANTIZATION_FILE)}


def _settings_on_top(config: Json) -> Json:
    """The config with its quantization settings where every loader looks for them, and there alone.

    Some models that read pictures (Kimi-K2.5) have them in `text_config`, where their own class and vLLM
    (`config/vllm.py`) look only if there are none on top.
    """
    text = config.get("text_config")
    if not isinstance(text, dict) or not text.get(SETTINGS_KEY):
        return config
    plain = {key: value for key, value in text.items() if key != SETTINGS_KEY}
    return {**config, "text_config": plain, SETTINGS_KEY: config.get(SETTINGS_KEY) or text[SETTINGS_KEY]}


def _refuse_other_weights(folder: Path, names: Sequence[str]) -> None:
    if _ADAPTER in names:
        raise UnsupportedModel(
            f"{folder}: holds a LoRA adapter, not a model",
            "open it with its base, as the commands do that are given its folder",
        )
    for name in names:
        if name.startswith(OWN_LAYOUT) and name.endswith(".safetensors"):
            raise UnsupportedModel(
                f"{folder}: holds {shown(name)} in the layout of Mistral's own programs, not read here",
                "most of these models have model.safetensors on the Hub, too; where not, transformers has "
                "convert_mistral_weights_to_hf.py",
            )
        if name.endswith(".safetensors"):
            raise CorruptCheckpoint(
                f"{folder}: holds {shown(name)}, but neither {SINGLE_FILE} nor {INDEX_FILE}",
                "to read this one file, name it instead of the folder",
            )
        if name.endswith(".gguf"):
            raise UnsupportedModel(
                f"{folder}: holds a GGUF file, {shown(name)}", "name the file instead of the folder"
            )
        if name.endswith(_PICKLED) and name != "training_args.bin":
            raise UnsupportedModel(
                f"{folder}: holds weights as a pickle, {shown(name)}, which can run code and is never opened",
                "load the model where you trust it and call save_pretrained(..., safe_serialization=True)",
            )
    if CONFIG_FILE not in names:
        if inside := _models_inside(folder):
            few = ", ".join(map(shown, inside[:5])) + (", ..." if len(inside) > 5 else "")
            kind = "folders with models" if len(inside) > 1 else "folder with a model"
            raise CorruptCheckpoint(
                f"{folder}: holds no checkpoint itself, but {len(inside)} {kind}: {few}",
                f"name one of them: {shown(str(folder / inside[-1]))}",
            )
        raise CorruptCheckpoint(
            f"{folder}: holds no checkpoint, neither {CONFIG_FILE} nor {SINGLE_FILE}",
            "give a folder that has both, or the name of a model on the Hub",
        )


def _models_inside(folder: Path) -> list[str]:
    """The folders in a folder that hold models or adapters, those of later steps of a training last."""
    configs = (CONFIG_FILE, "adapter_config.json")
    found = [path.parent.name for name in configs for path in folder.glob(f"*/{name}")]
    return sorted(set(found), key=lambda name: (len(name), name))


def _assemble(folder: Path, config: Json, weights: _Weights) -> HFCheckpoint:
    shards = tuple(SafetensorsFile(file, weights.remote.get(file.name)) for file in weights.files)
    headers = [shard.header for shard in shards]
    homes, differences = locate(headers, weights.index)
    opened = {CONFIG_FILE, INDEX_FILE, README_FILE, *(file.name for file in weights.files)}
    readme = folder / README_FILE
    return HFCheckpoint(
        path=folder,
        config=config,
        specs=ShardedSpecs(tuple(headers), homes),
        sidecars=sidecars_of(folder, opened),
        readme=readme if readme.is_file() else None,
        warnings=(*weights.warnings, *(w for header in headers for w in header.warnings), *differences),
        index_sha256=weights.index.sha256 if weights.index else None,
        shards=shards,
        homes=homes,
    )
