"""Resolves what a user calls a model to a local folder: a path, or a name on the Hugging Face Hub.

The invariant: an existing path wins; from the Hub only configuration, tokenizer, texts, safetensors and the
code that a config names are fetched, never pickles; code is copied, and never run. Cache, endpoint, token and
offline mode are those of huggingface_hub (HF_HOME, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qconvert.core.dtypes import TensorSpec
from qconvert.demo import MODEL_DIR
from qconvert.errors import CorruptCheckpoint, QConvertError, UnsupportedModel, shown
from qconvert.formats.huggingface.folder import weight_files
from qconvert.formats.huggingface.own_code import module_folders, named_code
from qconvert.formats.huggingface.safetensors_file import SINGLE_FILE, tensor_spec

EMBEDDED = "embedded"
"""The name of the small model that comes with qconvert."""

_TEXTS = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.md", "LICENSE*", "LICENCE*", "NOTICE*")
_MODULE_SUFFIXES = ("json", "txt", "model", "safetensors")  # of sentence-transformers
_HUB_NAME = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
_WRITTEN = "a model on the Hub is written org/name"
_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """The local folder or file of a model, and the repository and commit of one from the Hub.

    `headers` are the specs of weights of which only headers were fetched; `is_embedded` marks the model that
    comes with qconvert.
    """

    path: Path
    repo_id: str | None = None
    revision: str | None = None
    commit: str | None = None
    headers: Mapping[str, TensorSpec] | None = None
    is_embedded: bool = False

    @property
    def name(self) -> str:
        """The name for outputs: the repository's, the folder's, or the file's stem.

        Files and folders whose own names say nothing (model.safetensors, a snapshot in the Hub's cache) have
        the name of what holds them.
        """
        if self.is_embedded:
            return EMBEDDED
        if self.repo_id is not None:
            return self.repo_id.rsplit("/", 1)[-1]
        path = self.path.resolve()
        if path.is_file() and path.stem.startswith("model") and path.suffix != ".gguf":
            path = path.parent
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return path.parent.parent.name.rsplit("--", 1)[-1]
        return path.name if path.is_dir() else path.stem


def resolve(model: str, *, revision: str | None = None, weights: bool = True) -> ResolvedModel:
    """Finds a model: a path, `org/name`, `org/name@revision` or `hf://org/name`; `revision` takes precedence.

    Files of a Hub model are downloaded into the cache unless they are cached. Without `weights`, only the
    headers of weights that are not cached are fetched (a few kilobytes a file). Raises QConvertError with a
    hint for everything that can go wrong on the way.
    """
    if os.path.exists(model):  # noqa: PTH110 - Path.exists raises for a name that is too long
        return ResolvedModel(Path(model))
    if model == EMBEDDED:
        return ResolvedModel(MODEL_DIR, is_embedded=True)
    match = _HUB_NAME.fullmatch(model)
    if match is None:
        raise QConvertError(f"{shown(model)}: no such file or folder", _WRITTEN)
    repo_id, asked = match["repo"], revision or match["revision"]
    with _explained(model):
        folder = _download(repo_id, asked, _TEXTS)
        _download_own_files(repo_id, folder)
        files = weight_files(folder) or (folder / SINGLE_FILE,)
        headers = None
        if weights:
            _download(repo_id, folder.name, [SINGLE_FILE, *(file.name for file in files)])
        elif not all(file.exists() for file in files):
            headers = _remote_headers(repo_id, folder.name)
    if weights and not weight_files(folder):
        raise UnsupportedModel(
            f"{model}: has no {SINGLE_FILE} and no index of shards on the Hub",
            "only safetensors are read; look for a converted revision or repository",
        )
    return ResolvedModel(folder, repo_id, asked, folder.name, headers)


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
    with _explained(name, "dataset"):
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


def _remote_headers(repo_id: str, commit: str) -> dict[str, TensorSpec] | None:
    """Returns the specs in the headers of a repository's safetensors; None if it has none."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError

    try:
        repo = HfApi().get_safetensors_metadata(repo_id, revision=commit)
    except NotASafetensorsRepoError:
        return None
    return {
        name: tensor_spec(file, name, tensor.dtype, tensor.shape)
        for file, header in repo.files_metadata.items()
        for name, tensor in header.tensors.items()
    }


@contextmanager
def _explained(model: str, kind: str = "model") -> Iterator[None]:
    """Converts exceptions of huggingface_hub to one sentence and a hint."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, SafetensorsParsingError

    # The base of every error of the HTTP library, whose choice depends on huggingface_hub's version.
    network: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        yield
    except SafetensorsParsingError as error:
        raise CorruptCheckpoint(f"{model}: {_first_line(error)}") from error
    except (network, OSError, HFValidationError, RuntimeError) as error:  # RuntimeError: hf_xet's downloads
        fact, hint = _explanation(error, kind)
        raise QConvertError(f"{model}: {fact}", hint) from error


def _explanation(error: BaseException, kind: str = "model") -> tuple[str, str]:
    """Returns what went wrong with the Hub, and what the user can do; only models can be folders instead."""
    from huggingface_hub import constants, errors

    local = "not a local folder, and " if kind == "model" else ""
    log_in = "run `hf auth login` or set HF_TOKEN"
    again = "check the connection and HF_ENDPOINT, then run it again: what has arrived is kept"
    answers = {  # the first match; a gated repository is also one not found
        errors.GatedRepoError: (
            "is gated, and not open to you",
            f"accept its terms on its page, then {log_in}",
        ),
        errors.RepositoryNotFoundError: (
            f"{local}there is no such {kind} on the Hub",
            f"check the name; if it is private, {log_in}",
        ),
        errors.RevisionNotFoundError: ("has no such revision on the Hub", "name a branch, a tag or a commit"),
        errors.HFValidationError: (f"{local}not a valid name for a {kind} on the Hub", _WRITTEN),
    }
    for cause, answer in answers.items():
        if isinstance(error, cause):
            return answer
    if isinstance(error, errors.LocalEntryNotFoundError):
        if constants.HF_HUB_OFFLINE:
            fact, hint = "HF_HUB_OFFLINE forbids downloading it", "unset HF_HUB_OFFLINE to download it"
            return f"{local}not fully downloaded; {fact}", hint
        return f"{local}not fully downloaded ({_first_line(error.__cause__ or error)})", again
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        fact = f"the cache {constants.HF_HUB_CACHE} cannot be written: {error.strerror}"
        return fact, "free some space, or set HF_HOME to a folder that can be written"
    return f"download failed: {_first_line(error)}", again


def _first_line(error: BaseException) -> str:
    return shown(next(iter(str(error).splitlines()), type(error).__name__), limit=300)
