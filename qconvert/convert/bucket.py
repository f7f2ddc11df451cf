"""Sends an output to object storage, where a model is there once its config.json is.

Weights are uploaded one after another, in parts; then the texts; config.json comes last, and does not replace
another one unasked, so that a half upload is never loaded as a model. A GGUF file is one object, which stores
show only when it is whole; of several parts every one says how many there are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from qconvert.checkpoint.network import Network
from qconvert.checkpoint.object_store import Place, explained, open_place
from qconvert.convert.bucket_files import MARK, BucketFiles
from qconvert.convert.known_as import KnownAs
from qconvert.core.dtypes import Json
from qconvert.errors import OutputExists, UnsupportedModel

_STALE = (".safetensors", ".safetensors.index.json")
_PART_BYTES = 16 << 20


class Bucket:
    """`s3://bucket/prefix/name` as the `Destination` of a folder, or of GGUF files beside that name.

    Where `completes`, files of the output that a run has left there without the last one are replaced.
    """

    def __init__(self, url: str, network: Network, *, completes: bool = False) -> None:
        self._is_file = url.endswith(".gguf")
        self._place: Place = open_place(url.rpartition("/")[0] if self._is_file else url, network)
        self.files = BucketFiles(self._place, network, is_file=self._is_file)
        self._url, self._overwrite, self._count, self._completes = url, False, 0, completes
        self._stale: list[str] = []

    @property
    def shown(self) -> str:
        return self._url

    def sent(self, job: KnownAs, weights: Collection[str], *, by_any: bool = False) -> Json | None:
        return None  # objects do not say which job has made them

    def begin(self, job: KnownAs, weights: Collection[str], *, overwrite: bool, resumed: bool) -> None:
        self._overwrite = overwrite or resumed
        if self._place.is_web:
            raise UnsupportedModel(f"{self._url}: a web server accepts no output", "name a bucket: s3://...")
        there = self._place.names()
        taken = [name for name in there if name == MARK or name.endswith(_STALE)]
        taken = [name for name in there if name in weights] if self._is_file else taken
        left = self._completes and set(taken) <= set(weights)
        if taken and not (self._overwrite or left):
            raise OutputExists(f"{self._url}: holds {taken[0]} already", "use --overwrite, or another prefix")
        if taken and overwrite and not resumed and not self._is_file:
            self._delete(name for name in taken if name == MARK)
        self._stale = [] if self._is_file or not overwrite else [n for n in taken if n not in weights]

    def put(self, name: str, path: Path, sha256: str) -> str:
        import obstore

        size = path.stat().st_size
        with explained(f"{self._place.url}/{name}", writing=True):
            made = obstore.put(
                self._place.store, name, path, use_multipart=size > _PART_BYTES, chunk_size=_PART_BYTES
            )
        self._count += size
        return str(made["e_tag"])

    def holds(self, name: str, size: int, receipt: str) -> bool:
        found = self._place.head(name)
        return found is not None and (str(found["e_tag"]), found["size"]) == (receipt, size)

    def finish(self, receipts: Mapping[str, str], texts: Mapping[str, bytes | Path]) -> Json:
        import obstore

        texts = {} if self._is_file else texts
        for name in sorted(texts, key=lambda name: name == MARK):
            text, last = texts[name], name == MARK
            raw = text if isinstance(text, bytes) else text.read_bytes()
            if last:
                self._delete(each for each in self._stale if each not in texts)
            with explained(f"{self._place.url}/{name}", writing=True):
                mode = "create" if last and not self._overwrite else "overwrite"
                obstore.put(self._place.store, name, raw, mode=mode)
        return {"to": self._url, "url": self._url, "bytes": self._count}

    def clear(self) -> None:
        pass  # all that was sent is visible

    def _delete(self, names: Iterable[str]) -> None:
        import obstore

        found = list(names)
        if found:
            with explained(self._place.url, writing=True):
                obstore.delete(self._place.store, found)
