"""The HTML report with 2, 5 and 12 models, on a phone, a tablet and a desk, light and dark, in Chromium.

Boxes are measured, not pixels: no text leaves its box, and no label lies on a point or on another label.
QCONVERT_PICTURES names a folder for screenshots of the same pages, to look at.
"""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qconvert.evaluate.paired_statistics import CURVE_PERCENTILES, Divergence, Estimate
from qconvert.evaluate.perplexity import evaluate
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import protocol_named
from qconvert.evaluate.records import (
    Comparison,
    Continuation,
    ModelResult,
    Origin,
    PromptSample,
    WeightError,
    WeightFile,
)
from qconvert.evaluate.weights_report import WeightReport
from qconvert.report.html import to_html
from tests.evaluate.test_perplexity import IDS, as_tokens, eval_model
from tests.report.test_report_html import CHROMIUM, browse

WIDTHS = (390, 800, 1280)
# Labels, bytes and mean KL divergences as of a model of 1.5 billion weights; some lie close together.
MODELS = (
    ("Qwen2.5-1.5B-Instruct-int4-g128", 1.13e9, 0.0591),
    ("Qwen2.5-1.5B-Instruct-Q4_K_M.gguf", 0.99e9, 0.0402),
    ("int8-channel", 1.78e9, 0.0008),
    ("Qwen2.5-1.5B-Instruct-Q8_0.gguf", 1.65e9, 0.0009),
    ("fp8-channel", 1.79e9, 0.0062),
    ("int4-g32", 1.22e9, 0.0390),
    ("nvfp4", 1.14e9, 0.0580),
    ("mxfp4", 1.12e9, 0.0620),
    ("Qwen2.5-1.5B-Instruct-Q2_K.gguf", 0.68e9, 0.81),
    ("int3-asym-g64", 0.98e9, 0.19),
    ("Qwen2.5-1.5B-Instruct-IQ4_XS.gguf", 0.90e9, 0.0480),
    ("Qwen2.5-1.5B-Instruct-int4-g128-feedback", 1.13e9, 0.0170),
)
ROLES = ("attn.q", "attn.k", "attn.v", "attn.o", "mlp.gate", "mlp.up", "mlp.down")


def compared(kl: float) -> Comparison:
    """A model whose distribution of divergences has this mean, and a tail."""
    curve = tuple(kl * (0.02 + 12 * (percent / 100) ** 8) for percent in CURVE_PERCENTILES)
    tail = Divergence(Estimate(kl, kl / 20), kl * 0.6, kl * 2, kl * 6, kl * 9, kl * 12, curve)
    return Comparison(Estimate(1 + kl, kl / 30), tail, Estimate(0.97 - kl / 9, 0.002), Estimate(0.03, 0.001))


def model(label: str, size: float, kl: float) -> ModelResult:
    file = WeightFile("model.safetensors", int(size), "a" * 64)
    origin = Origin(f"/models/quantized/{label}", f"/models/quantized/{label}", None, "b" * 64, (file,))
    bits = 16 * size / 3.1e9
    loss = Estimate(9.1 * (1 + kl), 0.06)
    return ModelResult(label, int(size), bits, "bf16", loss, 0.61, 812.0, compared(kl), origin)


def errors(label: str, worst: float) -> WeightReport:
    found = tuple(
        WeightError(f"{role}.{i}", role, i, (worst * (1 + i / 40)) ** 2, 1.0, 0.1, 0.5)
        for i in range(28)
        for role in ROLES
    )
    return WeightReport("Qwen2.5-1.5B-Instruct", label, found, 57, ())


@pytest.fixture(scope="module")
def base() -> PerplexityReport:
    rules = protocol_named("gptq2048", 16)
    return evaluate([eval_model("other")], eval_model("base"), as_tokens(IDS), rules)


def document(base: PerplexityReport, count: int) -> str:
    """The page of a report of so many models."""
    reference = "Qwen2.5-1.5B-Instruct"
    first = replace(model(reference, 3.1e9, 0.0), versus=None)
    models = (first, *(model(*each) for each in MODELS[:count]))
    said = (
        "def add(a, b):\n    return a + b  # a line that is much longer than a phone is wide, without a break"
    )
    sample = PromptSample(said, said, tuple(Continuation(m.label, said, 20) for m in models))
    report = replace(
        base,
        reference=reference,
        models=models,
        weights=tuple(errors(m.label, 0.01 * (i + 1)) for i, m in enumerate(models[1:])),
        command=("qconvert", "eval", "perplexity", *(f"/models/quantized/{m.label}" for m in models)),
        samples=(sample,),
    )
    return to_html(report.page(), report.figures())


PROBE = """<!doctype html>
<meta name="color-scheme" content="SCHEME">
<body style="margin:0">FRAMES<pre id="out"></pre><script>SCRIPT</script>"""


def measure(folder: Path, page: str, *, dark: bool, picture: str = "") -> list[dict[str, Any]]:
    """What the probe finds in the page at every width; its pictures get this name."""
    (folder / "report.html").write_text(page, encoding="utf-8")
    frames = "".join(
        f'<iframe src="report.html" width="{w}" height="900" style="border:0"></iframe>' for w in WIDTHS
    )
    scheme = "dark" if dark else "light"
    script = Path(__file__).with_name("report_probe.js").read_text(encoding="utf-8")
    probe = PROBE.replace("SCHEME", scheme).replace("FRAMES", frames).replace("SCRIPT", script)
    (folder / "probe.html").write_text(probe, encoding="utf-8")
    flags = ("--allow-file-access-from-files", f"--blink-settings=preferredColorScheme={0 if dark else 1}")
    ran = browse(folder, "probe.html", *flags, "--window-size=2600,1000", "--dump-dom")
    out = re.search(r'<pre id="out">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert out and out[1], ran.stdout[-600:] + ran.stderr[-600:]
    found = json.loads(html.unescape(out[1]))
    assert isinstance(found, list)
    pictures = os.environ.get("QCONVERT_PICTURES")
    if pictures and picture:
        for width, seen in zip(WIDTHS, found, strict=True):
            shot = Path(pictures) / f"{picture}-{width}-{scheme}.png"
            size = f"--window-size={width},{seen['height']}"
            browse(folder, "report.html", *flags[1:], size, f"--screenshot={shot}")
    return found


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("count", [2, 5, 12])
def test_nothing_leaves_its_box_and_no_label_lies_on_a_point(
    base: PerplexityReport, tmp_path: Path, count: int, dark: bool
) -> None:
    page = document(base, count)
    for width, found in zip(
        WIDTHS, measure(tmp_path, page, dark=dark, picture=f"{count}-models"), strict=True
    ):
        assert (width, found["found"]) == (width, [])
        assert found["dark"] == dark and found["labels"] == count and found["pictures"] == 2 + count


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ((r'(<text class="name" x=")[\d.]+(" y=")[\d.]+', r"\g<1>395\g<2>100"), "text leaves its picture"),
        ((r"<dd>", "<dd style='white-space:nowrap;overflow-wrap:normal'>" + "long " * 90), "leaves its box"),
        ((r"<h1>", "<h1 style='color:#ddd'>"), "text is hard to read"),
        ((r"<h1>", "<div style='width:2000px'>wide</div><h1>"), "page is 20"),
    ],
)
def test_the_probe_sees_what_is_wrong(
    base: PerplexityReport, tmp_path: Path, damage: tuple[str, str], said: str
) -> None:
    page = re.sub(damage[0], damage[1], document(base, 2), count=1)
    assert any(said in each for found in measure(tmp_path, page, dark=False) for each in found["found"])


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_the_probe_sees_a_label_on_a_point(base: PerplexityReport, tmp_path: Path) -> None:
    page = document(base, 2)
    place = re.search(r'<path class="mark[^"]*" transform="translate\(([\d.]+) ([\d.]+)\)', page)
    assert place
    page = re.sub(
        r'(<text class="name" x=")[\d.]+(" y=")[\d.]+', rf"\g<1>{place[1]}\g<2>{place[2]}", page, count=1
    )
    assert any(
        "label on a point" in each for found in measure(tmp_path, page, dark=False) for each in found["found"]
    )


def test_figures_come_before_where_they_are_from(base: PerplexityReport) -> None:
    page = document(base, 12)
    said = re.findall(r'<div class="verdict">|<h2>([^<]*)</h2>|<summary>([^<]*)</summary>', page)
    headings = ["".join(each) for each in said]
    assert headings[:2] == ["", "Quality"] and headings[3] == "Size against quality"
    assert headings.index("Size against quality") < headings.index("Words")
    assert headings.index("Words") < headings.index("How it was measured") < headings.index("Files measured")
    assert headings[-1].startswith("Errors of the weights")  # collapsed
