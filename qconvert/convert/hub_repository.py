"""Sends an output to a repository on the Hugging Face Hub, where it becomes visible by one commit.

Weights go to a branch of their own, named after the job; the last commit copies them by reference to the
branch that was asked for, with the texts, and the staging branch is removed. So a repository holds a whole
model or none, and a run that was killed finds what it has sent. The requests are those of huggingface_hub:
large files go through xet where it is installed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from qconvert.checkpoint.hub_errors import network_error, refusal
from qconvert.checkpoint.hub_file import may_pass, wait_after
from qconvert.checkpoint.network import Attempts, Network
from qconvert.convert.known_as import KnownAs
from qconvert.core.dtypes import Json
from qconvert.core.version import NUMERICS, __version__
from qconvert.errors import REPORT, BadRecipe, CheckFailed, NotTaken, OutputExists, SourceUnavailable, shown

T = TypeVar("T")
_TARGET = re.compile(r"(?:hf://)?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<branch>[\w./-]+))?")
_MAIN = "main"
_STALE = (".safetensors", ".safetensors.index.json")  # what a loader would read beside, or instead of, ours
# What the Hub answers where somebody else has changed a branch meanwhile, or removed it.
_CHANGED, _GONE = (409, 412), 404
# What the Hub's client takes, measured on files of 1 GB: through xet 348 to 369 MB, with any settings; by
# plain HTTP, by which a process sends that is to take less than a GB, 15 to 22 MB.
_BY_XET, _BY_HTTP, _LEAST_FOR_XET = 400_000_000, 24_000_000, 1_000_000_000
# In the description of the commit that makes an output visible: the hash of its job, and what was asked of
# which version.
_JOB, _ASKED = "qconvert job", "asked"
_VERSION = re.compile(r" of (qconvert [\w.+-]+, numerics \d+)")
VERSION = f"qconvert {__version__}, numerics {NUMERICS}"


def repository_named(target: str) -> tuple[str, str]:
    """The repository and the branch of `org/name` or `org/name@branch`; BadRecipe for anything else."""
    match = _TARGET.fullmatch(target)
    if match is None:
        raise BadRecipe(f"--push-to {shown(target)}: not a repository on the Hub", "write org/name")
    return match["repo"], match["branch"] or _MAIN


def require_token(target: str) -> None:
    """Raise NotTaken without a token: the Hub accepts no anonymous upload."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise NotTaken(
            f"--push-to {shown(target)}: no token for the Hub",
            "run `hf auth login` with a token that may write, or set HF_TOKEN",
        )


def sending_bytes(memory: int | None) -> int:
    """The memory that sending takes in a process limited to so much; None without a limit."""
    return _BY_XET if _sends_by_xet(memory) else _BY_HTTP


def _sends_by_xet(memory: int | None) -> bool:
    from huggingface_hub import constants

    there = not constants.HF_HUB_DISABLE_XET and find_spec("hf_xet") is not None
    return there and (memory is None or memory >= _LEAST_FOR_XET)


class HubRepository:
    """`org/name`, or `org/name@branch`, as the `Destination` of an output.

    A repository that is not there is created, `private` if asked for. `network` has the patience; the process
    may take so much `memory` (None: no limit).
    """

    files = None

    def __init__(
        self, target: str, network: Network, *, private: bool = False, memory: int | None = None
    ) -> None:
        self._repo, self._branch = repository_named(target)
        self._by_xet = _sends_by_xet(memory)
        self._network, self._private = network, private
        self._job, self._staging, self._head = KnownAs("", ""), "", ""
        self._staged: dict[str, str] | None = None
        self._visible: dict[str, str] = {}
        self._texts: frozenset[str] = frozenset()
        self._stale: list[str] = []
        self._count = 0

    @property
    def shown(self) -> str:
        return self._repo if self._branch == _MAIN else f"{self._repo}@{self._branch}"

    def sent(self, job: KnownAs, weights: Collection[str], *, by_any: bool = False) -> Json | None:
        from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

        self._know(job)
        try:
            commits = self._ask(lambda: list(_api().list_repo_commits(self._repo, revision=self._branch)))
            made = next((each for each in commits if f"{_JOB} {job.job}" in each.message), None)
            if made is not None:
                return self._told(made.commit_id) if self._has_all_of(made.commit_id, weights) else None
            asked = f"{_ASKED} {job.asked}"
            made = next((each for each in commits if by_any and asked in each.message), None)
            if made is None or not self._has_all_of(made.commit_id, weights):
                return None
        except NotTaken as refused:
            if isinstance(refused.__cause__, RepositoryNotFoundError | RevisionNotFoundError):
                return None
            raise
        version = _VERSION.match(made.message.partition(asked)[2])
        return {**self._told(made.commit_id), "version": version[1] if version else "another version"}

    def _has_all_of(self, commit: str, weights: Collection[str]) -> bool:
        """Whether these weights of a commit are there unchanged; of a folder, divided as they were then."""
        now, then = (self._files(revision)[0] for revision in (self._branch, commit))
        shards = [name for name in then if name.endswith(_STALE[0])]
        in_shards = any(name.endswith(_STALE[0]) for name in weights) and not then.keys() >= set(weights)
        names = shards if in_shards else weights
        return bool(names) and all(name in then and now.get(name) == then[name] for name in names)

    def _know(self, job: KnownAs) -> None:
        """Know the job, and by that its staging branch."""
        self._job, self._staging = job, f"qconvert-{job.job[:12]}"

    def begin(self, job: KnownAs, weights: Collection[str], *, overwrite: bool, resumed: bool) -> None:
        self._know(job)
        self._create()
        self._look()
        folder = any(name.endswith(".safetensors") for name in weights)
        names = [*self._visible, *self._texts]
        self._stale = [n for n in names if folder and n.endswith(_STALE) and n not in weights]
        taken = [*self._stale, *(name for name in weights if name in self._visible)]
        if taken and not (overwrite or resumed):
            self._require_same(min(taken), self.sent(job, weights, by_any=True))
        if not overwrite:
            self._stale = []
        try:
            self._staged, _ = self._files(self._staging)
        except NotTaken as refused:
            if _status(refused) != _GONE:
                raise

    def _require_same(self, name: str, there: Json | None) -> None:
        """Raise OutputExists for a file of another model than the one that is `there` by this very job."""
        if there is not None and "version" not in there:
            return
        by, hint = "", "use --overwrite, or push to another branch"
        if there is not None:
            by = f", by {there['version']} with the same recipe"
            hint = "use --skip-existing to leave it, or --overwrite to make it again"
        raise OutputExists(f"{self.shown}: holds {name} already{by}", hint)

    def put(self, name: str, path: Path, sha256: str) -> str:
        if sha256 in self._known(name):
            return sha256
        try:
            self._send(name, path, sha256)
        except NotTaken as refused:
            # Another process of the same job may have made all of it visible, and removed the branch.
            if _status(refused) != _GONE or not self._is_visible({name: sha256}):
                raise
        return sha256

    def _send(self, name: str, path: Path, sha256: str) -> None:
        """Send a file to the staging branch, to which other processes of the same job may send theirs."""
        from huggingface_hub import CommitOperationAdd

        def send() -> None:
            with self._opened(path) as file:
                added = CommitOperationAdd(name, file)
                _api().preupload_lfs_files(self._repo, [added], revision=self._staging)
                if added.upload_info.sha256.hex() != sha256:
                    raise CheckFailed(f"{name}: what was sent is not what was verified", REPORT)
                message = f"{name}, to be published with the others"
                _api().create_commit(self._repo, [added], commit_message=message, revision=self._staging)

        if self._staged is None:
            source = {"branch": self._staging, "revision": self._branch}
            self._ask(lambda: _api().create_branch(self._repo, **source, exist_ok=True))
            self._staged, _ = self._files(self._staging)
        if self._staged.get(name) != sha256:
            self._ask(send, again=_CHANGED)
            self._staged[name] = sha256
            self._count += path.stat().st_size

    @contextmanager
    def _opened(self, path: Path) -> Iterator[str | BinaryIO]:
        """A file as the Hub's client takes it: by its name, or open, which it sends by plain HTTP."""
        if self._by_xet:
            yield str(path)
            return
        logger = getLogger("huggingface_hub")  # which would say so of every file
        level = logger.level
        logger.setLevel(ERROR)
        try:
            with path.open("rb") as file:
                yield file
        finally:
            logger.setLevel(level)

    def _known(self, name: str) -> tuple[str | None, ...]:
        """The SHA-256 of a file where it is staged, and where it is visible."""
        return (self._staged or {}).get(name), self._visible.get(name)

    def holds(self, name: str, size: int, receipt: str) -> bool:
        return receipt in self._known(name)

    def finish(self, receipts: Mapping[str, str], texts: Mapping[str, bytes | Path]) -> Json:
        from huggingface_hub import CommitOperationAdd, CommitOperationCopy, CommitOperationDelete

        def operations() -> list[Any]:
            """New ones for each attempt: huggingface_hub takes them once."""
            moved = [name for name, digest in receipts.items() if self._visible.get(name) != digest]
            added = {name: text for name, text in texts.items() if not self._keeps(name, receipts)}
            return [
                *(CommitOperationDelete(name) for name in self._stale if name not in texts),
                *(CommitOperationCopy(name, name, src_revision=self._staging) for name in moved),
                *(CommitOperationAdd(n, t if isinstance(t, bytes) else str(t)) for n, t in added.items()),
            ]

        def commit() -> str:
            made = _api().create_commit(
                self._repo,
                operations(),
                commit_message=f"Model by qconvert {__version__}",
                commit_description=f"{_JOB} {self._job.job}\n{_ASKED} {self._job.asked} of {VERSION}",
                revision=self._branch,
                parent_commit=self._head,
            )
            return str(made.oid)

        try:
            oid = self._ask(commit)
        except NotTaken as refused:
            # It was made by ourselves, and the answer was lost on the way; or by another process of the job.
            if _status(refused) not in (*_CHANGED, _GONE) or not self._is_visible(receipts):
                raise
            oid = self._head
        self.clear()
        return self._told(oid)

    def clear(self) -> None:
        with suppress(NotTaken):  # it does no harm
            self._ask(lambda: _api().delete_branch(self._repo, branch=self._staging))

    def _told(self, oid: str) -> Json:
        """What is there by a commit, and how much of it this run has sent."""
        url = _api().endpoint + f"/{self._repo}" + ("" if self._branch == _MAIN else f"/tree/{self._branch}")
        return {"to": self.shown, "url": url, "commit": oid, "bytes": self._count}

    def _keeps(self, name: str, receipts: Collection[str]) -> bool:
        """Whether a text of the repository stays: the card of one that GGUF files are added to."""
        return name == "README.md" and name in self._texts and all(n.endswith(".gguf") for n in receipts)

    def _is_visible(self, receipts: Mapping[str, str]) -> bool:
        """Whether the branch that was asked for has these files now."""
        self._look()
        return all(self._visible.get(name) == digest for name, digest in receipts.items())

    def _create(self) -> None:
        """Make sure that repository and branch are there, and no more public than was asked for."""
        api = _api()
        self._ask(lambda: api.create_repo(self._repo, private=self._private or None, exist_ok=True))
        if self._private and not self._ask(lambda: api.repo_info(self._repo)).private:
            raise OutputExists(
                f"{self._repo}: is public, and --private was asked for",
                "leave it out, or push to another repository",
            )
        if self._branch != _MAIN and not self._branch.startswith("refs/"):
            self._ask(lambda: api.create_branch(self._repo, branch=self._branch, exist_ok=True))

    def _look(self) -> None:
        """Look at what the branch holds: its head, its large files, and the names of all others."""
        self._head = str(self._ask(lambda: _api().repo_info(self._repo, revision=self._branch)).sha)
        self._visible, self._texts = self._files(self._branch)

    def _files(self, revision: str) -> tuple[dict[str, str], frozenset[str]]:
        """The SHA-256 of the large files of a revision, by name; the names of all others."""
        found = self._ask(lambda: list(_api().list_repo_tree(self._repo, revision=revision)))
        files = [each for each in found if hasattr(each, "lfs")]  # and no folder
        large = {each.path: str(each.lfs.sha256) for each in files if each.lfs}
        return large, frozenset(each.path for each in files if not each.lfs)

    def _ask(self, request: Callable[[], T], again: Collection[int] = ()) -> T:
        """One request to the Hub, again where a later one may succeed; NotTaken says what it answers.

        It is made `again` after answers with these numbers, too.
        """
        host = urlsplit(_api().endpoint).netloc
        attempts = Attempts(self._network, f"{host}: {self._repo}")
        while True:
            try:
                self._network.wait_turn()
                return request()
            except Exception as error:
                cause = _cause(error)
                if isinstance(cause, FileNotFoundError):  # a file here: others have finished, and removed it
                    raise cause from None
                if not isinstance(cause, network_error() | OSError | RuntimeError | ValueError):
                    raise
                fact, hint = refusal(cause)
                passes = isinstance(cause, network_error() | OSError) and may_pass(cause)
                if not (passes or _status_of(cause) in again):
                    raise NotTaken(f"{self._repo}: {fact}", hint) from cause
                try:
                    wait_after(attempts, host, cause)
                except SourceUnavailable as ended:
                    raise NotTaken(f"{self._repo}: {fact}", hint) from ended


def _api() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="qconvert", library_version=__version__)


def _status(refused: NotTaken) -> int | None:
    """The number of the answer that a refusal is told of."""
    return _status_of(refused.__cause__)


def _status_of(cause: Any) -> int | None:
    return getattr(getattr(cause, "response", None), "status_code", None)


def _cause(error: BaseException) -> BaseException:
    """What an error of an upload was raised for."""
    while isinstance(error, RuntimeError) and error.__cause__ is not None:
        error = error.__cause__
    return error
