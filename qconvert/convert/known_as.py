"""Hashes what tells jobs apart, so that a place where an output was sent knows whose it is."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from qconvert.core.dtypes import Json

# Facts that a new version of qconvert leaves as they are (`convert.identity`).
_ASKED = ("source", "request", "statistics")


@dataclass(frozen=True, slots=True)
class KnownAs:
    """What a destination knows an output by: the hash of its `job`, and of what was `asked` for.

    A job is another one with another version of qconvert, other kernels or packages; what was asked is not.
    """

    job: str
    asked: str


def job_hash(facts: Json) -> str:
    """The SHA-256 of the facts that tell jobs apart."""
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def known_as(facts: Json) -> KnownAs:
    """What a destination knows a job by: what stays on this disk does not count."""
    asked = {name: facts.get(name) for name in _ASKED}
    job = {name: fact for name, fact in facts.items() if name != "dropped"}
    return KnownAs(job_hash(job), job_hash(_said(asked)))


def _said(fact: Any) -> Any:
    """A fact without what is nothing, so that an option of a later version, left out, changes no hash."""
    if isinstance(fact, dict):
        said = {key: _said(value) for key, value in fact.items()}
        return {key: value for key, value in said.items() if value not in (None, False, "", [], {})}
    return [_said(each) for each in fact] if isinstance(fact, list) else fact
