"""lm-evaluation-harness on our decoder gives what it gives on transformers' model of the same folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TASK = """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{start}}"
doc_to_choice: "{{ends}}"
doc_to_target: "{{right}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
PYTHON = [
    ("import os\n\ndef main(", ["args):", "elephant"], 0),
    ("for i in range(", ["banana", "len(x)):"], 1),
    ("class Error(", ["Exception):", "tomorrow"], 0),
    ("        return ", ["self", "seventeen dogs"], 0),
    ("if x is not ", ["umbrella", "None:"], 1),
]


@pytest.fixture(scope="module")
def harness() -> Any:
    return pytest.importorskip("lm_eval", reason="lm-eval is not installed")


def scores(harness: Any, model: str, arguments: str, folder: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    data = folder / "data.jsonl"
    rows = [{"start": start, "ends": ends, "right": right} for start, ends, right in PYTHON]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "choose.yaml").write_text(TASK % data)
    tasks = TaskManager(include_path=str(folder), include_defaults=False)
    found: dict[str, Any] = harness.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=["choose"],
        task_manager=tasks,
        bootstrap_iters=0,
        log_samples=True,
    )
    return found


def test_a_task_scores_as_with_transformers(
    harness: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import qconvert.evaluate.lm_eval_adapter  # noqa: F401
    from qconvert.checkpoint.hub import EMBEDDED, resolve

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = resolve(EMBEDDED).path
    ours = scores(harness, "qconvert", "path=embedded", tmp_path)
    theirs = scores(harness, "hf", f"pretrained={folder},dtype=float32,device=cpu", tmp_path)
    assert ours["results"]["choose"] == theirs["results"]["choose"]
    assert ours["results"]["choose"]["acc,none"] >= 0.8
    for mine, other in zip(ours["samples"]["choose"], theirs["samples"]["choose"], strict=True):
        for (a, greedy), (b, wanted) in zip(mine["filtered_resps"], other["filtered_resps"], strict=True):
            assert float(a) == pytest.approx(float(b), abs=1e-4) and greedy == wanted


def test_texts_and_continuations(harness: Any) -> None:
    from lm_eval.api.instance import Instance

    from qconvert.evaluate.lm_eval_adapter import QConvertLM

    model = QConvertLM("embedded")

    def asked(kind: str, *arguments: Any) -> Any:
        return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)  # type: ignore[arg-type]

    text = "def f(x):\n    return x\n"
    (whole,) = model.loglikelihood_rolling([asked("loglikelihood_rolling", text)])
    ((pair, _),) = model.loglikelihood([asked("loglikelihood", "", text)])
    assert whole == pytest.approx(pair, abs=1e-6) and whole < 0
    (line,) = model.generate_until(
        [asked("generate_until", "import ", {"until": ["\n"], "max_gen_toks": 16})]
    )
    (more,) = model.generate_until([asked("generate_until", "import ", {"max_gen_toks": 16})])
    assert more.startswith(line) and "\n" not in line and line
