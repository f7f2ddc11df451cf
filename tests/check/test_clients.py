"""Clients that were run on our files: the page is made of the figures, and `check` foretells them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from evals import client_subjects, clients
from evals.client_environments import CLIENTS, Client
from evals.client_subjects import subjects
from evals.client_table import agrees, failures, holds, tables
from qconvert.core.dtypes import Json
from qconvert.formats.layouts import registry
from tests.support.forked_python import fork_commands

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "clients.md"
FIGURES: Json = json.loads(clients.RESULTS.read_text(encoding="utf-8"))
# What each client reads in the suite: the mean difference of log-probabilities is that of its arithmetic.
SMALL = {
    "vllm": ("gptq int4", 0.01),
    "transformers": ("compressed-tensors int4", 1e-5),
    "transformers-4": ("hqq int4-asym-g64", 1e-5),
    "gptqmodel": ("gptq_v2 int4-asym", 0.01),
    "mlx-lm": ("mlx int4-g64", 0.08),
    "llama.cpp": ("gguf q8_0", 0.05),
}

# Of gpt-oss's stacks alone; and what needs other tools than the clients have, which
# tests/layouts/test_layouts_by_others.py and tests/layouts/test_fp8_kinds.py load.
LOADED_ELSEWHERE = {"mxfp4", "hqq", "fbgemm_fp8"}


def test_the_page_is_made_of_the_figures() -> None:
    page = PAGE.read_text(encoding="utf-8")
    between = page.partition("<!-- clients -->\n")[2].partition("\n<!-- end of clients -->")[0]
    assert between.splitlines() == tables(FIGURES), "python -m evals.clients table --write"


def test_every_layout_and_client_has_figures() -> None:
    names = {row["subject"] for row in FIGURES["rows"]}
    assert names <= {each.name for each in subjects() if each.clients}
    stored = [layout for layout in registry.written() if layout not in LOADED_ELSEWHERE]
    assert all(any(name.startswith(layout) for name in names) for layout in (*stored, "gguf"))
    assert {row["client"] for row in FIGURES["rows"]} == {client.name for client in CLIENTS}


def test_check_foretold_what_happened() -> None:
    assert not failures(FIGURES)


def test_what_agreement_is() -> None:
    loaded, garbage, refused = {"mean": 0.01}, {"mean": 3.0}, {"error": "ValueError: no"}
    assert holds(loaded) and not holds(garbage) and not holds(refused)
    assert agrees({**loaded, "check": "loads only with"}) and not agrees({**loaded, "check": "fails"})
    assert agrees({**garbage, "check": "fails"}) and not agrees({**refused, "check": "loads"})


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_a_client_computes_what_the_decoder_does(
    client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if client.python() is None:
        pytest.skip(f"{client.name} is not installed (python -m evals.clients install {client.name})")
    fork_commands(monkeypatch, clients, client_subjects)
    monkeypatch.setattr(clients, "windows", partial(clients.windows, count=1))  # mlx takes 2 s for one
    name, noise = SMALL[client.name]
    chosen = [each for each in subjects() if each.name == name]
    (row,) = clients.measured(replace(client, ways=client.ways[:1]), chosen, tmp_path, tmp_path)
    assert "error" not in row, row["error"]
    assert row["mean"] < noise and row.get("equal", 1) == 1 and agrees(row)
