"""Resolves what a user calls a model: a path, or a name on the Hugging Face Hub.

The invariant: an existing path wins; from the Hub only configuration, tokenizer, texts, safetensors and the
code that a config names are fetched, never pickles; code is copied, and never run. Cache, endpoint, token and
offline mode are those of huggingface_hub (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).

How weights come that stay on the Hub:
1. texts are downloaded into the cache; one HEAD a file gives its size, ETag and signed address (`hub_file`);
2. the header of each file is fetched, and parsed as a local one is (`remote_bytes`, `safetensors_file`);
3. the plan says which bytes every block of rows reads; neighbours become windows (`convert.read_ahead`);
4. threads fetch windows in the order of the blocks, within the memory that is set (`windows`, `http_ranges`);
5. blocks read from the windows as from files, and a window is freed with the last block that needs it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from qconvert.checkpoint.adapter_texts import texts_of
from qconvert.checkpoint.hub_errors import WRITTEN, explained
from qconvert.checkpoint.hub_file import HubFile, find_files
from qconvert.checkpoint.hub_ranges import HubRanges
from qconvert.checkpoint.network import Network
from qconvert.checkpoint.object_store import ObjectFile, download_texts, is_address, open_place
from qconvert.checkpoint.remote_bytes import RemoteBytes
from qconvert.demo import MODEL_DIR
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel, shown
from qconvert.formats.huggingface.adapter import ADAPTER_CONFIG, WEIGHTS, base_of, is_adapter, name_of_file
from qconvert.formats.huggingface.folder import weight_files
from qconvert.formats.huggingface.own_code import module_folders, named_code
from qconvert.formats.huggingface.safetensors_file import INDEX_FILE, SINGLE_FILE
from qconvert.formats.huggingface.shard_index import read_index

EMBEDDED = "embedded"
"""The name of the small model that comes with qconvert."""

_TEXTS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.md", "LICENSE*", "LICENCE*", "NOTICE*")
_MODULE_SUFFIXES = ("json", "txt", "model", "safetensors")  # of sentence-transformers
# Of a header whose length is not known: more tensors than most models of one file have.
_FIRST_BYTES = 64 << 10
# What a header says of a tensor beside its name, and of the file.
_ENTRY_BYTES, _METADATA_BYTES = 96, 1 << 10
_CHECKPOINT = re.compile(r"checkpoint-\d+")
_HUB_NAME = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The local folder or file of a model, and the repository and commit of one from the Hub.

    `remote` are the weight files, by name, that are not in the folder, read through `network`; `is_embedded`
    marks the model that comes with qconvert. Of one in object storage, `address` is where, and `texts` holds
    the folder as long as it is needed. An adapter is in the folder `adapter`, and `base` is the model that it
    changes; `path` then has the texts of both, and no weights.
    """

    path: Path
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    remote: Mapping[str, RemoteBytes] | None = None
    network: Network | None = None
    is_embedded: bool = False
    address: str | None = None
    texts: TemporaryDirectory[str] | None = None
    adapter: Path | None = None
    base: ResolvedModel | None = None

    @property
    def place(self) -> ResolvedModel:
        """Where the weights of a model are; of an adapter, those of its base."""
        return self.base or self

    @property
    def known_as(self) -> str:
        """What records call it: its repository, its address, or its name."""
        return self.repo_id or self.address or self.name

    @property
    def title(self) -> str:
        """The name, and of an adapter that of its base, as commands print them."""
        return self.name if self.base is None else f"{self.name} merged into {self.base.name}"

    @property
    def name(self) -> str:
        """The name for outputs: the repository's, the folder's, or the file's stem.

        Files and folders whose own names say nothing (model.safetensors, config.json, a snapshot in the Hub's
        cache) have the name of what holds them; those of a trainer (checkpoint-500) have it before their own.
        """
        if self.is_embedded:
            return EMBEDDED
        if self.repo_id is not None or self.address is not None:
            return (self.repo_id or self.address or "").rsplit("/", 1)[-1]
        path = self.path.resolve()
        if path.is_file() and is_adapter(path):
            return name_of_file(path)
        if path.is_dir() and _CHECKPOINT.fullmatch(path.name) and path.parent.name:
            return f"{path.parent.name}-{path.name.replace('-', '')}"  # a part in names of GGUF
        unnamed = path.name == "config.json" or (path.stem.startswith("model") and path.suffix != ".gguf")
        if unnamed and path.is_file():
            path = path.parent
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return path.parent.parent.name.rsplit("--", 1)[-1]
        return path.name if path.is_dir() else path.stem


def resolve(
    model: str, *, revision: str | None = None, weights: bool = True, network: Network | None = None
) -> ResolvedModel:
    """Finds a model: a path, `org/name`, `org/name@revision`, `hf://org/name`, or an `object_store` address.

    `revision` takes precedence. Of an adapter the base is found, too: the one before it (`BASE+ADAPTER`), or
    that its config names. Files of a Hub model are downloaded into the cache unless they are cached. With a
    `network`, weights that are not cached stay on the Hub, to be read through it; without `weights`, only
    their headers can be.
    Raises QConvertError with a hint for everything that can go wrong on the way.
    """
    is_path = os.path.exists(model)  # noqa: PTH110 - Path.exists raises for a name that is too long
    base, _, named = ("", "", model) if is_path else model.rpartition("+")
    found = _find(named, revision, network, weights=weights)
    if is_adapter(found.path):
        return _adapted(found, named, base, network, weights=weights)
    if base:
        raise QConvertError(f"{shown(named)}: is a model, not an adapter", "write BASE+ADAPTER")
    return found


def _adapted(
    found: ResolvedModel, written: str, named: str, network: Network | None, *, weights: bool
) -> ResolvedModel:
    """The adapter that was `written`, with its base: the one that is named, or that its config names."""
    name = named or base_of(found.path)
    hint = f"write the base before it: BASE+{shown(written)}"
    if not name:
        raise CorruptCheckpoint(f"{found.name}: {ADAPTER_CONFIG} names no base", hint)
    if not named and is_address(name):  # a file does not decide which servers are asked
        raise UnsupportedModel(f"{found.name}: its base is at {shown(name)}", hint)
    try:
        base = _find(name, None, network, weights=weights)
    except QConvertError as error:
        if named:
            raise
        raise type(error)(f"{found.name}: its base, {error.fact}", hint) from error
    if is_adapter(base.path):
        fact = f"{shown(name)}: is an adapter itself, not a model"
        raise UnsupportedModel(fact, "merge one after the other, with `qconvert merge`")
    path = texts_of(base.path, found.path, found.name)
    return ResolvedModel(path, remote=base.remote, network=base.network, adapter=found.path, base=base)


def _find(model: str, revision: str | None, network: Network | None, *, weights: bool) -> ResolvedModel:
    """A model, or an adapter without its base (see `resolve`)."""
    if os.path.exists(model):  # noqa: PTH110 - Path.exists raises for a name that is too long
        return ResolvedModel(Path(model))
    if model == EMBEDDED:
        return ResolvedModel(MODEL_DIR, is_embedded=True)
    if is_address(model):
        return _resolve_address(model, network, weights=weights)
    match = None if model.startswith((".", "/", "~")) else _HUB_NAME.fullmatch(model)
    if model.endswith(".gguf") and (match is None or Path(model).parent.is_dir()):
        raise QConvertError(f"{shown(model)}: no such file", "check the path")
    if match is None:
        raise QConvertError(f"{shown(model)}: no such file or folder", WRITTEN)
    repo_id, asked = match["repo"], revision or match["revision"]
    streams = network is not None or not weights
    network, remote = network or Network(), None
    with explained(model):
        folder = _download(repo_id, asked, _TEXTS)
        if is_adapter(folder):
            _download(repo_id, folder.name, WEIGHTS)
            return ResolvedModel(folder, repo_id, asked, folder.name)
        _download_own_files(repo_id, folder)
        files = weight_files(folder) or (folder / SINGLE_FILE,)
        if not streams:
            _download(repo_id, folder.name, [SINGLE_FILE, *(file.name for file in files)])
        elif not all(file.exists() for file in files):
            remote = _remote(repo_id, folder, files, network, has_bytes=weights) or None
    if weights and not weight_files(folder) and not remote:
        raise UnsupportedModel(
            f"{model}: has no {SINGLE_FILE} and no index of shards on the Hub",
            "only safetensors are read; look for a converted revision or repository",
        )
    return ResolvedModel(folder, repo_id, asked, folder.name, remote, network if remote else None)


def _resolve_address(model: str, network: Network | None, *, weights: bool) -> ResolvedModel:
    """A model in object storage or on a web server, whose weights stay there."""
    if network is None and weights:
        raise QConvertError(
            f"{model}: is read once, while it is converted; this command or method reads it several times",
            "copy the model to this disk first",
        )
    network = network or Network()
    place = open_place(model, network)
    texts = download_texts(place, tuple(each.lstrip("*") for each in _TEXTS))
    folder = Path(texts.name)
    indexed = {each.name for each in weight_files(folder)} if (folder / INDEX_FILE).exists() else set()
    expected = header_bytes(folder) if indexed else {}

    def opened(name: str) -> RemoteBytes | None:
        about = place.head(name)
        if about is None:
            return None
        file = ObjectFile(place, name, about, network)
        return RemoteBytes(file, expected.get(name, _FIRST_BYTES), has_bytes=weights)

    with ThreadPoolExecutor(network.connections) as pool:
        names = sorted(indexed) or [SINGLE_FILE]
        found = dict(zip(names, pool.map(opened, names), strict=True))
    remote = {name: each for name, each in found.items() if each is not None}
    missing = found.keys() - remote
    if missing:
        raise UnsupportedModel(
            f"{place.url}: has no {shown(min(missing))}",
            f"name the folder with config.json and {SINGLE_FILE}, or all shards and their {INDEX_FILE}",
        )
    return ResolvedModel(folder, None, None, None, remote, network, address=place.url, texts=texts)


def is_on_hub(model: str) -> bool:
    """Whether `resolve` looks on the Hub for what a user calls a model."""
    here = os.path.exists(model) or model == EMBEDDED  # noqa: PTH110 - as in `resolve`
    return not (here or is_address(model)) and _HUB_NAME.fullmatch(model) is not None


def cached_models() -> list[str]:
    """The repositories in the Hub's cache that have a config.json: `org/name`, in order."""
    from huggingface_hub import constants

    try:
        folders = sorted(Path(constants.HF_HUB_CACHE).glob("models--*--*"))
        held = [folder.name for folder in folders if any(folder.glob("snapshots/*/config.json"))]
    except OSError:
        return []
    return [name.removeprefix("models--").replace("--", "/", 1) for name in held]


def resolve_texts(name: str, suffixes: Sequence[str]) -> Path:
    """The cached snapshot of a dataset on the Hub (`org/name` or `org/name@revision`) with its text files.

    Files of these suffixes are downloaded, in folders as well. Raises QConvertError as `resolve` does.
    """
    from huggingface_hub import snapshot_download

    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise QConvertError(f"{shown(name)}: not a valid name for a dataset on the Hub", "write hub:org/name")
    with explained(name, "dataset"):
        return Path(
            snapshot_download(
                match["repo"],
                repo_type="dataset",
                revision=match["revision"],
                allow_patterns=[f"*{suffix}" for suffix in suffixes],
            )
        )


def _download_own_files(repo_id: str, folder: Path) -> None:
    """Fetches the code and the modules that a snapshot's configs name, as files to copy."""
    from huggingface_hub import snapshot_download

    code = ["*.py"] if named_code(folder) else []
    modules = [f"{each.name}/*.{suffix}" for each in module_folders(folder) for suffix in _MODULE_SUFFIXES]
    if code:
        _download(repo_id, folder.name, code)
    if modules:
        snapshot_download(repo_id, revision=folder.name, allow_patterns=modules)


def _download(repo_id: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Returns the cached snapshot with the matching top-level files; its name is the commit."""
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"])
    )


def _remote(
    repo_id: str, folder: Path, files: Sequence[Path], network: Network, *, has_bytes: bool
) -> dict[str, RemoteBytes]:
    """The weight files of a snapshot that are not in its folder, by name, with their headers."""
    indexed = (folder / INDEX_FILE).exists()
    # One file is read before shards, as in transformers.
    single = find_files(repo_id, folder.name, [SINGLE_FILE], network)
    if single or not indexed:
        found, first_bytes = single, {SINGLE_FILE: _FIRST_BYTES}
    else:
        names = [file.name for file in files if not file.exists()]
        found, first_bytes = find_files(repo_id, folder.name, names, network), header_bytes(folder)
        missing = set(names) - {file.name for file in found}
        if missing:
            raise UnsupportedModel(
                f"{repo_id}: {shown(min(missing))}, which {INDEX_FILE} names, is not on the Hub",
                "ask who keeps the repository to upload it",
            )

    def opened(file: HubFile) -> RemoteBytes:
        return RemoteBytes(HubRanges(file), first_bytes[file.name], has_bytes=has_bytes)

    with ThreadPoolExecutor(network.connections) as pool:
        return {each.file.name: each for each in pool.map(opened, found)}


def header_bytes(folder: Path) -> dict[str, int]:
    """About how long the headers of the shards are, by file, counted from the names in the index."""
    found: Counter[str] = Counter()
    for tensor, file in read_index(folder / INDEX_FILE).weight_map.items():
        found[file] += len(tensor.encode()) + _ENTRY_BYTES
    return {file: nbytes + _METADATA_BYTES for file, nbytes in found.items()}
