"""Sends outputs elsewhere: which options go together, where an output goes, and what is told of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from qconvert.cli.options import url_of
from qconvert.cli.skipping import Tell, tell_skipped
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
        from qconvert.convert.hub_repository import repository_named, require_token

        repository_named(flags.push_to)
        if not flags.dry_run:
            require_token(flags.push_to)
    if flags.push_to is not None and flags.to_store:
        raise BadRecipe("--push-to: given together with an object storage", _LEAVE_OUT)
    if not flags.verify:
        raise BadRecipe(f"--no-verify: given together with {to}, which sends what was verified", _LEAVE_OUT)
    if not flags.keeps:
        _check_beside(flags)
    if flags.drop_pushed and flags.reads_back:
        raise BadRecipe(
            f"--drop-pushed: --method {flags.method} reads what it has written once more", _LEAVE_OUT
        )


def _check_beside(flags: Flags) -> None:
    """Raise BadRecipe for files beside an output that is not kept here; a bucket has room for a manifest."""
    from qconvert.convert.gguf_sidecars import MANIFEST

    if set(flags.beside) - ({MANIFEST} if flags.to_store else set()):
        raise BadRecipe("--card, --modelfile: no local file is kept", "leave them out")


def destination_of(flags: Flags, out: Path) -> Destination | None:
    """Where the output called `out` goes; None where it stays."""
    from qconvert.cli.hub_source import network_of

    url = url_of(out)
    network = network_of(flags.connections, flags.patience, talks=flags.talks)
    if flags.push_to is not None:
        from qconvert.convert.hub_repository import HubRepository

        return HubRepository(flags.push_to, network, private=flags.private, memory=flags.max_memory)
    if url is not None:
        from qconvert.convert.bucket import Bucket

        return Bucket(url, network, completes=flags.skips)
    return None


def sent_before(job: Job, out: Path, destination: Destination | None, flags: Flags) -> Json | None:
    """What is at the destination, where an earlier run of the same command has sent it and kept nothing."""
    from qconvert.convert.send_written import already_sent

    begun = any(path.exists() for path in job.container.partial(out))
    anew = flags.restart or (flags.overwrite and not flags.skips)
    if destination is None or flags.keeps or anew or begun:
        return None
    return already_sent(job, out, destination, by_any=flags.skips)


def tell_complete(job: Job, out: Path, destination: Destination | None, flags: Flags, tell: Tell) -> None:
    """Report an output that exists, complete, and was skipped; send it where it belongs elsewhere, too."""
    if destination is None or destination.files is not None:
        tell_skipped(job, out, flags, tell, destination=destination)
        return
    from qconvert.convert.send_written import send_where_lacking

    sent, before = send_where_lacking(job, out, destination, by_any=flags.skips)
    tell_skipped(job, out, flags, tell, sent)
    if flags.talks:
        click.echo(told_there(sent) if before else _told_sent(sent), err=True)


def tell_sent_before(job: Job, out: Path, sent: Json, flags: Flags, tell: Tell) -> None:
    """Say that the output was sent before, and is there."""
    from qconvert.cli.events import say_skipped

    say_skipped(flags.events, sent["url"])
    if flags.as_json:
        from qconvert.cli.conversion_report import files_json

        record = {"schema": 1, "ok": True, "dry_run": False, "skipped": True, "out": sent["url"]}
        tell(record | {"files": files_json(job, out), "sha256": {}, "sent": sent})
    elif flags.quiet:
        click.echo(sent["url"])
    else:
        click.echo(told_there(sent), err=True)


def told_there(sent: Json) -> str:
    """What is said of an output that is at its destination: by which commit, and whose, if another's."""
    there = f"{sent['to']}: already complete, by commit {sent['commit']}"
    if "version" not in sent:
        return f"{there}; nothing was sent"
    from qconvert.convert.hub_repository import VERSION

    this = f"this is {VERSION}" if sent["version"] != VERSION else "with other kernels or packages than here"
    again = "to make it again, leave out --skip-existing and give --overwrite"
    return f"{there} of {sent['version']} ({this}); nothing was sent\n{again}"


def _told_sent(sent: Json) -> str:
    from qconvert.report.tables import size

    return f"sent {size(sent['bytes'])}, now at {sent['url']}"


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
    return [_told_sent(result.sent)] if result.sent and flags.talks else []
