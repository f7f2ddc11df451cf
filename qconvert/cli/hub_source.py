"""Reads a Hub model while it is converted: with which connections, and what is told of it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from qconvert.checkpoint.network import Network
    from qconvert.convert.job import OpenedModel
    from qconvert.core.dtypes import Json


def network_of(connections: int, patience: float, *, talks: bool) -> Network:
    """What reads a Hub model while it is converted."""
    from qconvert.checkpoint.network import Network

    return Network(connections, patience, partial(click.echo, err=True) if talks else None)


def tell_download(model: str, what: str, *, talks: bool) -> None:
    """One line on a Hub model whose weights `what` reads several times, before they come."""
    from qconvert.checkpoint.hub import is_on_hub

    if talks and is_on_hub(model):
        click.echo(
            f"{model}: {what} reads weights several times: what the cache lacks is downloaded", err=True
        )


def tell_source(source: OpenedModel, *, talks: bool) -> None:
    """One line on weights that are read from the Hub while they are converted."""
    remote = source.location.remote
    if not (remote and talks):
        return
    from qconvert.report.tables import count, size

    total = size(sum(each.size for each in remote.values()))
    click.echo(f"reading what is needed of {count(len(remote), 'file')} on the Hub, {total}", err=True)


def fetched(source: OpenedModel) -> Json:
    """What was fetched from the Hub, as plain data; nothing of a model on this disk."""
    network = source.location.network
    if network is None:
        return {}
    asked = {"requests": network.requests, "bytes": network.nbytes, "retries": network.retries}
    return {"fetched": asked}
