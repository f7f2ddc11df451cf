"""Sends outputs elsewhere: which options go together, where an output goes, and what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qconvert.cli.options import url_of
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.cli.flags import Flags
    from qconvert.convert.job import Job, Result
    from qconvert.convert.publish import Destination
    from qconvert.core.dtypes import Json

_LEAVE_OUT = "leave out one of the two"


def check_sending(flags: Flags) -> None:
    """Raise BadRecipe for options that do not go together with the place that an output is sent to."""
    if flags.push_to is None:
        for name, given in {"--private": flags.private, "--drop-pushed": flags.drop_pushed}.items():
            if given:
                raise BadRecipe(f"{name}: nothing is pushed", "name a repository with --push-to org/name")
    if flags.stays:
        return
    to = "--push-to" if flags.push_to is not None else "-o"
    if flags.push_to is not None:
        from qconvert.convert.hub_repository import repository_named

        repository_named(flags.push_to)
    if flags.push_to is not None and flags.to_store:
        raise BadRecipe("--push-to: given beside an object storage", _LEAVE_OUT)
    if not flags.verify:
        raise BadRecipe(f"--no-verify: given beside {to}, which sends what was verified", _LEAVE_OUT)
    if flags.skip_existing:
        raise BadRecipe(f"--skip-existing: given beside {to}", _LEAVE_OUT)
    if flags.beside and not flags.keeps:
        raise BadRecipe("--card, --modelfile: no local file is kept", "leave them out")
    if flags.drop_pushed and flags.reads_back:
        raise BadRecipe(
            f"--drop-pushed: --method {flags.method} reads what it has written once more", _LEAVE_OUT
        )


def destination_of(flags: Flags, out: Path) -> Destination | None:
    """Where the output called `out` goes; None where it stays."""
    from qconvert.cli.hub_source import network_of

    url = url_of(out)
    network = network_of(flags.connections, flags.patience, talks=flags.talks)
    if flags.push_to is not None:
        from qconvert.convert.hub_repository import HubRepository

        return HubRepository(flags.push_to, network, private=flags.private)
    if url is not None:
        from qconvert.convert.bucket import Bucket

        return Bucket(url, network)
    return None


def disk_needed(job: Job, out: Path) -> int:
    """The bytes of disk that an output takes at a time."""
    sizes = sorted(job.container.partial(out).values())
    return sum(sizes[-2:]) if job.options.drop else job.container.bytes_needed


def told_of(result: Result, flags: Flags) -> Json:
    """Where the output was sent, as plain data; nothing of one that stays."""
    if not result.sent:
        return {}
    return {"sent": result.sent, **({} if flags.keeps else {"out": result.sent["url"]})}


def after_sending(result: Result, flags: Flags) -> list[str]:
    """One line on where the output was sent."""
    from qconvert.report.tables import size

    if not (result.sent and flags.talks):
        return []
    return [f"sent {size(result.sent['bytes'])}, now at {result.sent['url']}"]
