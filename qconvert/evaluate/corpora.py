"""Reads the texts to measure on, each identified by its SHA-256.

The wikitext-2 test set is published in two forms whose perplexities differ: `raw`, the file
wiki.test.raw that llama.cpp reads, and `hf-join`, the rows of the `datasets` library joined by blank
lines, which papers read. `hf-join` is computed from `raw`.
"""

from __future__ import annotations

import hashlib
import io
import zipfile
from dataclasses import replace
from pathlib import Path

from qconvert.errors import QConvertError, SourceUnavailable, shown
from qconvert.formats.tokenizers.tokenized_text import Text, read_text, text_of

WIKITEXT = "wikitext2"
WIKITEXT_SHA256 = {
    "raw": "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08",
    "hf-join": "696cca6b65a171b0a358a4be6732cdfdf2dd6164a32e20fd70e3c13fc4dfae83",
}
_WIKITEXT_BYTES = 1_290_590
# The source of llama.cpp's scripts/get-wikitext-2.sh.
_WIKITEXT_REPO, _WIKITEXT_ZIP = "ggml-org/ci", "wikitext-2-raw-v1.zip"
_TIMEOUT_SECONDS = 10.0
_WIKITEXT_MEMBER = "wikitext-2-raw/wiki.test.raw"


def load_text(source: str | Path, wikitext: str = "hf-join") -> Text:
    """The text of a UTF-8 file, or of `wikitext2` from the Hugging Face Hub in the given form.

    A byte-order mark is dropped; line ends stay as they are. Raises QConvertError for a file that
    is absent or not UTF-8, and where the Hub cannot be reached or sends other bytes.
    """
    if source == WIKITEXT:
        return _named(text_of(WIKITEXT, _download_wikitext(wikitext)))
    return _named(read_text(Path(source), f"give a text file, {WIKITEXT} or stdlib"))


def _named(text: Text) -> Text:
    """The text, under its published name if it is wikitext-2."""
    known = {sha256: f"wikitext-2 test ({form})" for form, sha256 in WIKITEXT_SHA256.items()}
    return replace(text, name=known.get(text.sha256, text.name))


def hf_join(raw: str) -> str:
    """The `datasets` rows of a wikitext file, joined as papers do.

    A row is a line with its end, or empty where the line is blank.
    """
    rows = io.StringIO(raw, newline="\n")
    return "\n\n".join(row if row.strip() else "" for row in rows)


def _download_wikitext(form: str) -> str:
    import huggingface_hub as hub
    from huggingface_hub.errors import HfHubHTTPError

    hint = "give wiki.test.raw as --text, from a machine that is online; or measure on --text stdlib"
    # The base of every error of the HTTP library below: which one that is depends on the version.
    network: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        archive = _archive()
        with zipfile.ZipFile(archive) as files:
            member = files.getinfo(_WIKITEXT_MEMBER)
            if member.file_size != _WIKITEXT_BYTES:
                raise QConvertError(
                    f"{_WIKITEXT_MEMBER}: {member.file_size} bytes, not {_WIKITEXT_BYTES}", hint
                )
            raw = files.read(member).decode()
    except (OSError, network, KeyError, ValueError, zipfile.BadZipFile) as error:
        passing = isinstance(error, OSError | network) and not hub.constants.HF_HUB_OFFLINE
        kind = SourceUnavailable if passing else QConvertError
        raise kind(
            f"{WIKITEXT}: cannot be downloaded from {_WIKITEXT_REPO}: {shown(str(error), 200)}", hint
        ) from error
    text = hf_join(raw) if form == "hf-join" else raw
    if hashlib.sha256(text.encode()).hexdigest() != WIKITEXT_SHA256[form]:
        raise QConvertError(f"{WIKITEXT}: the bytes from {_WIKITEXT_REPO} are not the published ones", hint)
    return text


def _archive() -> str:
    """The archive in the cache of the Hub, downloaded only where the cache lacks the archive.

    One request goes to the Hub before the download: without a network, the library would retry for half a
    minute, and report every attempt.
    """
    import huggingface_hub as hub

    cached = hub.try_to_load_from_cache(_WIKITEXT_REPO, _WIKITEXT_ZIP, repo_type="dataset")
    if isinstance(cached, str):
        return cached
    if hub.constants.HF_HUB_OFFLINE:
        raise OSError("it is not in the cache, and HF_HUB_OFFLINE is set")
    url = hub.hf_hub_url(_WIKITEXT_REPO, _WIKITEXT_ZIP, repo_type="dataset")
    hub.get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS)
    return hub.hf_hub_download(_WIKITEXT_REPO, _WIKITEXT_ZIP, repo_type="dataset")
