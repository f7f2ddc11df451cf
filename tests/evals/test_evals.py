"""The scripts that measure accuracy: their arithmetic, and a small run of one that writes its figures."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from evals.ablation import ablation, cases
from evals.divergences import divergences
from evals.sensitivity import rank_correlation, summary
from evals.targets import CASES, CHOICES, FILE_TYPES
from qconvert.plan.gguf.file_types import find_file_type
from tests.support.commands import made


def test_rank_correlation_is_spearmans() -> None:
    a_N, b_N = np.array([10.0, 20, 30, 40, 50]), np.array([1.0, 3, 2, 5, 4])
    distances = ((np.argsort(np.argsort(a_N)) - np.argsort(np.argsort(b_N))) ** 2).sum()
    assert rank_correlation(a_N, b_N) == pytest.approx(1 - 6 * distances / (5 * 24))
    assert rank_correlation(a_N, -(a_N**3)) == pytest.approx(-1)
    # Equal numbers share a rank: those of [1, 1, 2] are 1.5, 1.5 and 3.
    want = np.corrcoef([1.5, 1.5, 3], [2, 1, 3])[0, 1]
    assert rank_correlation(np.array([1.0, 1, 2]), np.array([7.0, 5, 9])) == pytest.approx(want)


def test_a_summary_adds_up() -> None:
    rows = [{"expected_kl": 0.1, "kl": 0.2}, {"expected_kl": 0.4, "kl": 0.4}]
    found = summary("int4", rows, 0.5)
    assert found["sum_of_expected"] == pytest.approx(0.5) and found["sum_of_measured"] == pytest.approx(0.6)
    assert found["expected_over_measured"] == pytest.approx([0.5, 0.75, 1.0])
    assert found["rank_correlation"] == pytest.approx(1)


def test_a_case_lies_between_what_is_chosen_among() -> None:
    for choices in CHOICES:
        assert set(choices[1:-1]) <= set(CASES) and not {choices[0], choices[-1]} & set(CASES)
    for case in CASES:
        if not case.startswith("int"):
            assert find_file_type(FILE_TYPES.get(case, case)).base.name.lower() == case


def test_an_ablation_changes_one_thing_at_a_time(tmp_path: Path) -> None:
    found = cases(("int4-g128", "q4_k"), (64, 256), 3, (0.001, 0.01))
    assert len({case.name for case in found}) == len(found) == 10 + 2 + 2 + 1
    (tmp_path / "text.txt").write_text("A text of many words, which nobody needs to understand. " * 200)
    asked = ["embedded", "--calibration-text", tmp_path / "text.txt", "--window", 64, "--chunks", 2]
    case = json.dumps({"encoding": "int4-g128", "method": "weighted", "tokens": 256})
    ran = CliRunner().invoke(ablation, [*map(str, asked), "--one", case, "-o", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    same = made("quantize", "embedded", "--bits", 4, "-o", tmp_path / "same")
    measured = divergences("embedded", [tmp_path / "out", same], str(tmp_path / "text.txt"), 64, 2)
    for path in (tmp_path / "out", same):
        assert 0 < measured.mean(path).value < 1 and (measured.mean(path).se or 0) > 0
    gap = measured.difference(tmp_path / "out", same)
    assert gap.value == pytest.approx(
        measured.mean(tmp_path / "out").value - measured.mean(same).value, abs=1e-7
    )
