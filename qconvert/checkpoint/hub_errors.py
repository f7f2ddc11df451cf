"""Explains errors of the Hub in one sentence, with a hint."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from qconvert.errors import (
    NO_ROOM,
    CorruptCheckpoint,
    DiskFull,
    QConvertError,
    SourceUnavailable,
    shown,
)

WRITTEN = "a model on the Hub is written org/name"
_DISK_ERRORS = (
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST,
)  # fmt: skip
_TOKEN = re.compile(r"\bhf_\w+")
_QUERY = re.compile(r"\?[^\s\"'<>)\]]*")


def without_queries(text: str) -> str:
    """A text without the queries of its addresses: a signed one lets anybody read the file."""
    return _QUERY.sub("", text)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, fit for a message."""
    return shown(without_queries(next(iter(str(error).splitlines()), type(error).__name__)), limit=300)


def network_error() -> type[BaseException]:
    """The base of every error of the HTTP library, whose choice depends on huggingface_hub's version."""
    from huggingface_hub.errors import HfHubHTTPError

    found: type[BaseException] = HfHubHTTPError.__bases__[0]
    return found


class _WithoutQueries(logging.Filter):
    """Removes the queries from what huggingface_hub logs of lost downloads."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_queries(record.getMessage()), ()
        return True


@contextmanager
def explained(model: str, kind: str = "model") -> Iterator[None]:
    """Converts exceptions of huggingface_hub to one sentence and a hint."""
    from huggingface_hub.errors import HFValidationError, SafetensorsParsingError

    logger = logging.getLogger("huggingface_hub.file_download")
    if not any(isinstance(each, _WithoutQueries) for each in logger.filters):
        logger.addFilter(_WithoutQueries())
    try:
        yield
    except SafetensorsParsingError as error:
        raise CorruptCheckpoint(f"{model}: {first_line(error)}") from error
    except (network_error(), OSError, HFValidationError, RuntimeError) as error:  # RuntimeError: hf_xet
        raised, fact, hint = explanation(error, kind)
        raise raised(f"{model}: {fact}", hint) from error


def refusal(error: BaseException) -> tuple[str, str]:
    """Returns why the Hub does not take what is sent to a repository, and what the user can do."""
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status is None:
        _, fact, hint = explanation(error, "repository", SENDING)
        return fact, hint
    said = getattr(error, "server_message", None) or ""
    told = f"HTTP {status}" + (f": {_without_secrets(str(said))}" if said else "")
    log_in = "run `hf auth login` with a token that may write, or set HF_TOKEN"
    again = "then run the same command: what was sent is kept"
    if status in (402, 403) and re.search("storage|quota|limit", str(said), re.IGNORECASE):
        return f"the account's storage is full ({told})", f"free some of it or enlarge it, {again}"
    answers = {
        401: (f"the Hub knows neither you nor the repository ({told})", f"check the name, and {log_in}"),
        403: (f"you may not write there ({told})", f"ask its owner for the right to write, or {log_in}"),
        404: (f"there is no such repository or branch ({told})", "check the name"),
        409: (f"somebody else has changed it meanwhile ({told})", "run the same command again"),
        412: (f"somebody else has changed it meanwhile ({told})", "run the same command again"),
        413: (f"a file is too large for the Hub ({told})", "write smaller ones with --shard-size 5GB"),
        429: (f"the Hub limits how often it may be asked ({told})", f"wait an hour, {again}"),
    }
    if status in answers:
        return answers[status]
    return f"the Hub refuses it ({told})", f"look at https://status.huggingface.co, {again}"


def _without_secrets(text: str) -> str:
    """A server's words on one line, without queries and tokens."""
    return shown(_TOKEN.sub("hf_...", without_queries(" ".join(text.split()))), limit=200)


@dataclass(frozen=True, slots=True)
class Doing:
    """What was asked of the Hub, in the words of a message: to do it, its name, what is not done twice."""

    verb: str
    noun: str
    kept: str


DOWNLOADING = Doing("downloading it", "download", "no file is fetched twice")
SENDING = Doing("sending it", "sending", "what was sent is kept")


def explanation(
    error: BaseException, kind: str = "model", doing: Doing = DOWNLOADING
) -> tuple[type[QConvertError], str, str]:
    """Returns what went wrong with the Hub, and what the user can do; only models can be folders instead.

    `doing` says what was requested. The class of the error says whether a repetition may help.
    """
    from huggingface_hub import constants, errors

    local = "not a local folder, and " if kind == "model" else ""
    log_in = "run `hf auth login` or set HF_TOKEN"
    again = f"check the connection and HF_ENDPOINT, then run it again: {doing.kept}"
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
        errors.HFValidationError: (f"{local}not a valid name for a {kind} on the Hub", WRITTEN),
    }
    for cause, answer in answers.items():
        if isinstance(error, cause):
            return QConvertError, *answer
    missing = isinstance(error, errors.LocalEntryNotFoundError)
    if isinstance(error, errors.OfflineModeIsEnabled) or (missing and constants.HF_HUB_OFFLINE):
        fact = f"{local}not fully downloaded; HF_HUB_OFFLINE forbids {doing.verb}"
        return QConvertError, fact, "unset HF_HUB_OFFLINE to download it"
    if missing:
        fact = f"{local}not fully downloaded ({first_line(error.__cause__ or error)})"
        return SourceUnavailable, fact, again
    if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        fact = f"the cache {constants.HF_HUB_CACHE} cannot be written: {error.strerror}"
        hint = "free some space, or set HF_HOME to a folder that can be written"
        return DiskFull if error.errno in NO_ROOM else QConvertError, fact, hint
    return SourceUnavailable, f"{doing.noun} failed: {first_line(error)}", again
