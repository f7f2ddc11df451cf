"""The HTML page: nothing loaded, nothing cut off on a phone or a desk."""

from __future__ import annotations

import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from qconvert.evaluate.perplexity import evaluate
from qconvert.evaluate.perplexity_report import PerplexityReport
from qconvert.evaluate.protocols import protocol_named
from qconvert.evaluate.records import WeightError
from qconvert.evaluate.weights_report import WeightReport
from qconvert.report.html import to_html
from tests.evaluate.test_perplexity import IDS, as_tokens, eval_model

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def report() -> PerplexityReport:
    rules = protocol_named("gptq2048", 16)
    models = [
        eval_model("other"),
        replace(eval_model("other"), label="<i>long-name-of-a-model-int4-g128-asym"),
    ]
    measured = evaluate(models, eval_model("base"), as_tokens(IDS), rules, noise_floor=True)
    errors = [
        WeightError(f"w{i}", role, i, 0.01 * (1 + i), 1.0, 0.1, 0.5)
        for role in ("attn.q", "mlp.down")
        for i in range(28)
    ]
    return replace(measured, weights=(WeightReport("base", "other", tuple(errors), 3, ()),))


@pytest.fixture(scope="module")
def document(report: PerplexityReport) -> str:
    return to_html(report.page(), report.figures())


class Elements(HTMLParser):
    """Every element with its attributes, and whether all that were opened were closed in order."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID and not (self.get_starttag_text() or "").endswith("/>"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_one_file_that_loads_nothing(document: str) -> None:
    elements = Elements()
    elements.feed(document)
    elements.close()
    assert elements.open == []
    names = {tag for tag, _ in elements.tags}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "image", "use", "i"}
    keys = {key for _, attrs in elements.tags for key in attrs}
    assert not {key for key in keys if key in ("src", "href", "xlink:href", "srcset") or key.startswith("on")}
    assert not re.search(r"https?:|@import|url\(", document)


def test_the_page_holds_every_table_and_picture(report: PerplexityReport, document: str) -> None:
    elements = Elements()
    elements.feed(document)
    page = report.page()
    terms = len(page.facts) + len(page.glossary)
    counts = {
        tag: sum(found == tag for found, _ in elements.tags) for tag in ("table", "svg", "figcaption", "dt")
    }
    assert counts == {"table": 4, "svg": 3, "figcaption": 3, "dt": terms}
    assert "prefers-color-scheme: dark" in document and "width=device-width" in document
    assert "&lt;i&gt;long-name" in document
    for _, value in (*page.facts, *page.glossary):
        assert escape(value) in document
    assert document.index(escape(page.verdict[0])) < document.index("<table>")


def test_without_a_reference_the_page_shows_perplexity_by_size() -> None:
    alone = evaluate([eval_model("base")], None, as_tokens(IDS), protocol_named("gptq2048", 16))
    (figure,) = alone.figures()
    assert "perplexity" in figure.svg and "nats" not in figure.svg


def browse(folder: Path, page: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """Open a page of a folder in Chromium, with a profile of its own and no network."""
    common = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run")
    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync")
    own = (f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--hide-scrollbars")
    return subprocess.run(
        [str(CHROMIUM), *common, *quiet, *own, *flags, (folder / page).as_uri()],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip


def pixels(png: bytes) -> np.ndarray:
    """The colours of a PNG of 8 bits a channel, uint8 [height, width, channels], by its specification."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    channels, at, data = {2: 3, 6: 4}[kind], 8, b""
    while at < len(png):
        (size,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + size]
        at += size + 12
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(height, 1 + width * channels)
    out = np.zeros((height, width * channels), np.uint8)
    for i, (method, row) in enumerate(zip(rows[:, 0], rows[:, 1:], strict=True)):
        above = out[i - 1].astype(int) if i else np.zeros(width * channels, int)
        if method in (0, 2):
            out[i] = row + (above if method else 0)
            continue
        line = [0] * channels + [0] * len(row)  # with a pixel before the first
        upper = [0] * channels + above.tolist()
        for k, x in enumerate(row.tolist(), channels):
            a, b, c = line[k - channels], upper[k], upper[k - channels]
            near = min((a, b, c), key=lambda v: abs(a + b - c - v))  # Paeth: ties go to a, then b
            line[k] = (x + (a if method == 1 else (a + b) // 2 if method == 3 else near)) & 255
        out[i] = line[channels:]
    return out.reshape(height, width, channels)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_paints_it_light_and_dark(document: str, tmp_path: Path, dark: bool) -> None:
    (tmp_path / "report.html").write_text(document, encoding="utf-8")
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    ran = browse(
        tmp_path, "report.html", scheme, "--window-size=600,300", f"--screenshot={tmp_path / 'shot.png'}"
    )
    assert (tmp_path / "shot.png").exists(), ran.stderr[-600:]
    shot = pixels((tmp_path / "shot.png").read_bytes())[..., :3]
    assert shot.shape[1] == 600
    ground = shot[5, 5].astype(int)
    assert ground.max() < 60 if dark else ground.min() > 200
    assert (np.abs(shot.astype(int) - ground).max(-1) > 120).mean() > 0.005  # letters and lines


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [390, 800, 1280])
def test_nothing_is_wider_than_the_window(document: str, tmp_path: Path, width: int) -> None:
    """Rendered in a frame of the width, the page's own scroll width is measured by a script beside it."""
    (tmp_path / "report.html").write_text(document, encoding="utf-8")
    probe = (
        f'<iframe id="f" src="report.html" width="{width}" height="900" style="border:0"></iframe>'
        '<p id="p"></p>'
        '<script>onload = () => { const d = document.getElementById("f").contentDocument;'
        ' const texts = [...d.querySelectorAll("svg text")].filter(t => {'
        ' const a = t.getBoundingClientRect(), b = t.closest("svg").getBoundingClientRect();'
        " return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1; });"
        ' document.getElementById("p").textContent = `width=${d.documentElement.scrollWidth}'
        ' cut=${texts.map(t => t.textContent).join("|")}.`; };</script>'
    )
    (tmp_path / "probe.html").write_text(probe)
    ran = browse(tmp_path, "probe.html", "--allow-file-access-from-files", "--dump-dom")
    assert f"width={width} cut=." in ran.stdout, ran.stdout[-600:] + ran.stderr[-600:]
