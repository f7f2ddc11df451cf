"""What another version of qconvert has pushed whole is skipped where asked for, and the version named."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from qconvert.convert import hub_repository, identity, manifest
from qconvert.core.version import NUMERICS, __version__
from tests.convert.test_push import folder, hub  # noqa: F401
from tests.support.commands import files_of, qconvert
from tests.support.fake_hub import FakeHub
from tests.support.pushing import PUSH, counted, pushed

OLD = "qconvert 0.0.9, numerics 77"
THIS = f"qconvert {__version__}, numerics {NUMERICS}"
DROP = (*PUSH, "--drop-pushed")
GGUF = ("to-gguf", "m", "--type", "q8_0", "--split-max-size", "300KB", "-o", "m-q8_0.gguf", "--push-to")
AGAIN = "to make it again, leave out --skip-existing and give --overwrite"


@contextmanager
def older() -> Iterator[None]:
    """As if another version were installed."""
    with (
        patch.object(identity, "__version__", "0.0.9"),
        patch.object(manifest, "__version__", "0.0.9"),
        patch.object(identity, "NUMERICS", 77),
        patch.object(hub_repository, "VERSION", OLD),
    ):
        yield


@pytest.mark.parametrize("command", [DROP, (*GGUF, "org/new", "--drop-pushed")], ids=["folder", "gguf"])
@pytest.mark.parametrize("option", ["--skip-existing", "--verify-existing"])
def test_what_another_version_has_pushed_is_skipped(
    hub: FakeHub,  # noqa: F811
    here: Path,
    command: tuple[object, ...],
    option: str,
) -> None:
    with older():
        commit = qconvert(*command, "--json").json["sent"]["commit"]
    before, done = pushed(hub), counted(hub)
    ran = qconvert(*command, option)
    there = f"org/new: already complete, by commit {commit} of {OLD} (this is {THIS}); nothing was sent"
    assert (ran.code, ran.err) == (0, f"{there}\n{AGAIN}\n"), ran.err
    told = qconvert(*command, option, "--overwrite", "--json").json
    assert told["skipped"] and (told["sent"]["commit"], told["sent"]["version"]) == (commit, OLD)
    assert (pushed(hub), counted(hub)) == (before, done) and not list(here.glob("out*"))
    ran = qconvert(*command)
    assert ran.code == 1 and "Error: org/new: holds m" in ran.err, "unless it is skipped"
    assert f" already, by {OLD} with the same recipe\nHint: use --skip-existing to leave it" in ran.err


def test_what_is_made_again_is_of_this_version(hub: FakeHub, here: Path) -> None:  # noqa: F811
    with older():
        assert qconvert(*DROP).code == 0
    before, done = pushed(hub), counted(hub)
    assert qconvert(*DROP, "--overwrite").code == 0
    assert counted(hub)[1] == done[1] + 1 and pushed(hub).keys() == before.keys()
    ran = qconvert(*DROP, "--skip-existing")
    assert ran.code == 0 and "; nothing was sent\n" in ran.err and OLD not in ran.err


def test_what_is_not_the_same_or_not_whole_is_refused(hub: FakeHub, here: Path) -> None:  # noqa: F811
    with older():
        assert qconvert(*DROP).code == 0
    done = counted(hub)
    skipping = (*DROP, "--skip-existing")
    ran = qconvert(*[8 if word == 4 else word for word in skipping])
    assert ran.code == 1 and "org/new: holds model" in ran.err, ran.err
    shard = next(name for name in pushed(hub) if name.endswith(".safetensors"))
    hub.repos["org/new"][shard] = b"somebody else's"
    ran = qconvert(*skipping)
    assert ran.code == 1 and "org/new: holds model" in ran.err, ran.err
    assert counted(hub) == done


def test_other_kernels_are_told(hub: FakeHub, here: Path) -> None:  # noqa: F811
    with patch("qconvert.convert.precompile.fingerprint", lambda plan: "of another machine"):
        assert qconvert(*DROP).code == 0
    ran = qconvert(*DROP, "--skip-existing")
    assert ran.code == 0 and f"of {THIS} (with other kernels or packages than here)" in ran.err, ran.err


def test_what_is_here_and_there_by_another_version_is_skipped(hub: FakeHub, here: Path) -> None:  # noqa: F811
    with older():
        assert qconvert(*PUSH).code == 0
    before, done, local = pushed(hub), counted(hub), files_of(here / "out")
    ran = qconvert(*PUSH, "--skip-existing")
    assert ran.code == 0 and ran.err.startswith("out: already complete, skipped\n"), ran.err
    assert f"of {OLD} (this is {THIS}); nothing was sent" in ran.err
    assert (pushed(hub), counted(hub), files_of(here / "out")) == (before, done, local)


def test_of_several_processes_one_tells(hub: FakeHub, here: Path) -> None:  # noqa: F811
    with older():
        assert qconvert(*DROP).code == 0
    done = counted(hub)
    first, late = (qconvert(*DROP, "--skip-existing", "--rank", f"{number}/2") for number in range(2))
    assert (first.code, late.code, late.out, late.err) == (0, 0, "", "")
    assert OLD in first.err and first.err.endswith(f"{AGAIN}\n") and counted(hub) == done


def test_an_option_of_a_later_version_that_is_left_out_changes_nothing() -> None:
    from qconvert.convert.known_as import known_as

    facts = {"source": {"a": 1}, "request": {"command": "quantize", "recipe": {"scheme": "int4"}}}
    later = {**facts, "request": {**facts["request"], "twice": False, "rules": [], "recipe": {
        "scheme": "int4", "later": None}}, "version": 2, "kernels": "x"}  # fmt: skip
    other = {**facts, "request": {**facts["request"], "recipe": {"scheme": "int8"}}}
    assert known_as(facts).asked == known_as(later).asked != known_as(other).asked
    assert known_as(facts).job != known_as(later).job
    assert known_as({**facts, "dropped": True}).job == known_as(facts).job
