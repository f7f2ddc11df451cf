"""Reads models from object storage (`s3://`, `gs://`, `az://`) and from plain web servers (`https://`).

The client is obstore, an optional dependency. Credentials are those of each provider's usual environment
(AWS_*, AWS_ENDPOINT_URL, GOOGLE_*, AZURE_*, instance roles); none is ever printed. The invariant: bytes are
asked for by ranges of the object whose ETag was seen first; another one is an error, never data.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qconvert.checkpoint.hub_errors import first_line
from qconvert.checkpoint.network import Network
from qconvert.errors import MissingExtra, NotTaken, QConvertError, SourceUnavailable, shown

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_ADDRESS = re.compile(r"(?P<scheme>s3|gs|az|https?)://(?P<rest>[^?#\s]+)")
_WEB = ("http", "https")
_REQUEST_SECONDS = 120
# Where the environment names a server without TLS, as of an emulator.
_PLAIN = (("AWS_ENDPOINT_URL", "http://"), ("GOOGLE_SERVICE_ACCOUNT_KEY", '"gcs_base_url": "http://'))
# What a plain web server, which lists nothing, is asked for beside the weights.
_TEXTS = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "vocab.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "preprocessor_config.json",
    "README.md", "LICENSE",
)  # fmt: skip


def is_address(model: str) -> bool:
    """Whether a model's name is an address that this module reads."""
    return _ADDRESS.match(model) is not None


@dataclass(frozen=True)
class Place:
    """A bucket's prefix, or a folder of a web server, opened; `url` has no slash at its end."""

    url: str
    store: ObjectStore

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]

    @property
    def is_web(self) -> bool:
        return self.url.startswith(_WEB)

    def names(self) -> list[str]:
        """The names of all objects directly below it; of a web server, those that models usually have."""
        import obstore

        if self.is_web:
            return list(_TEXTS)
        with explained(self.url):
            found = obstore.list_with_delimiter(self.store)
            return sorted(str(each["path"]).rsplit("/", 1)[-1] for each in found["objects"])

    def head(self, name: str) -> Any | None:
        """What the store knows of an object (size, e_tag, version); None where there is none."""
        import obstore

        try:
            with explained(f"{self.url}/{name}"):
                return obstore.head(self.store, name)
        except Missing:
            return None

    def text(self, name: str) -> bytes | None:
        """A small object, whole; None where there is none."""
        import obstore

        try:
            with explained(f"{self.url}/{name}"):
                return bytes(obstore.get(self.store, name).bytes())
        except Missing:
            return None


class Missing(SourceUnavailable):
    """There is no object of this name."""


def open_place(url: str, network: Network) -> Place:
    """Open a bucket's prefix or a web server's folder; nothing is asked of it yet.

    Raises MissingExtra without obstore, QConvertError for an address that cannot be one, or where the
    environment lacks what the provider needs.
    """
    try:
        from obstore.exceptions import BaseError
        from obstore.store import from_url
    except ImportError as error:
        raise MissingExtra(
            f"{shown(url)}: object storage needs a package that is not installed",
            "pip install 'qconvert[cloud]'",
        ) from error
    match = _ADDRESS.fullmatch(url.rstrip("/"))
    if match is None:
        raise QConvertError(
            f"{shown(url.partition('?')[0])}: not an address of a folder of models",
            "write s3://bucket/prefix, gs://bucket/prefix, az://container/prefix or https://host/folder",
        )
    plain = match["scheme"] == "http" or any(part in os.environ.get(name, "") for name, part in _PLAIN)
    options = {"timeout": timedelta(seconds=_REQUEST_SECONDS), **({"allow_http": True} if plain else {})}
    retries = {"retry_timeout": timedelta(seconds=network.patience), "max_retries": 100}
    try:
        store = from_url(url.rstrip("/"), client_options=options, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise QConvertError(f"{url}: cannot be opened: {_said(error)}", _CREDENTIALS) from error
    return Place(url.rstrip("/"), store)


_CREDENTIALS = "set the provider's environment: AWS_..., GOOGLE_APPLICATION_CREDENTIALS or AZURE_..."


@contextmanager
def explained(what: str, *, writing: bool = False) -> Iterator[None]:
    """Converts errors of obstore to one sentence and a hint, without anything that was signed."""
    from obstore import exceptions

    kind: type[QConvertError] = NotTaken if writing else SourceUnavailable
    try:
        yield
    except (exceptions.NotFoundError, FileNotFoundError) as error:
        if not writing:
            raise Missing(f"{what}: is not there", "check the address") from error
        raise kind(f"{what}: there is no such bucket", "create it, or check the address") from error
    except exceptions.PreconditionError as error:
        raise kind(
            f"{what}: has changed meanwhile, its ETag is another one", "start again when nothing writes to it"
        ) from error
    except (exceptions.UnauthenticatedError, exceptions.PermissionDeniedError) as error:
        raise kind(f"{what}: access is denied", _CREDENTIALS) from error
    except exceptions.BaseError as error:
        raise kind(f"{what}: {_said(error)}", "check the connection and the address") from error


def _said(error: BaseException) -> str:
    """The gist of what obstore says, whose details hold addresses and headers."""
    line = first_line(error)
    status = re.search(r"\b([45]\d\d) [A-Z]", str(error))
    return f"the server answers HTTP {status[1]}" if status else line.partition(" after ")[0]


class ObjectFile:
    """A weight file in a store: `name`, `size`, `etag`; fetched by ranges (`remote_bytes.RemoteFile`)."""

    sha256 = None

    def __init__(self, place: Place, name: str, about: Any, network: Network) -> None:
        self.name, self.network, self._place = name, network, place
        self.size = int(about["size"])
        version = about.get("version")
        self._tag = about.get("e_tag")
        self.etag = " ".join(str(each) for each in (self._tag, version) if each) or None

    @property
    def place(self) -> str:
        """Its address, for messages."""
        return f"{self._place.url}/{shown(self.name)}"

    def fetch(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer with the bytes from `offset` on; SourceUnavailable if they do not come."""
        import obstore

        options: dict[str, Any] = {"range": (offset, offset + len(buffer))}
        if self._tag is not None and not self._tag.startswith("W/"):
            options["if_match"] = self._tag
        done = 0
        self.network.check()
        self.network.count(requests=1)
        with explained(self.place):
            answer = obstore.get(self._place.store, self.name, options=options)
            if answer.meta["size"] != self.size:
                raise self._changed(f"it had {self.size:,} bytes, and has {answer.meta['size']:,}")
            for chunk in answer.stream():
                self.network.check()
                part = memoryview(chunk)
                if done + len(part) > len(buffer):
                    raise self._changed(f"more than {len(buffer):,} bytes come where these were asked for")
                buffer[done : done + len(part)] = part
                done += len(part)
                self.network.count(nbytes=len(part))
        if done != len(buffer):
            raise self._changed(f"{done:,} bytes come where {len(buffer):,} were asked for")

    def _changed(self, what: str) -> SourceUnavailable:
        return SourceUnavailable(
            f"{self.place}: has changed while it was read: {what}", "start again when nothing writes to it"
        )


def download_texts(place: Place, suffixes: tuple[str, ...]) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder with the small files of a place; it goes with the process, or before."""
    folder = tempfile.TemporaryDirectory(prefix="qconvert-")
    for name in place.names():
        if name.endswith(suffixes) and (found := place.text(name)) is not None:
            (Path(folder.name) / name).write_bytes(found)
    return folder
