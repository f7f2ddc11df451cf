"""Writes the model card of an output: upstream metadata kept, then sizes, recipe, and how to load it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qconvert.checkpoint.products import products_of
from qconvert.core.dtypes import Json
from qconvert.formats.huggingface.model_card_header import read_front_matter
from qconvert.formats.layouts import registry
from qconvert.models.parameter_table import table_of_outputs
from qconvert.plan.state import Compiled
from qconvert.report.tables import parameter_table_lines, size

_KEPT_KEYS = ("license", "license_name", "license_link", "language", "pipeline_tag", "datasets")


def model_card(
    name: str,
    manifest: Json,
    compiled: Compiled,
    upstream: Path | None,
    repo_id: str | None,
    code: Sequence[str] = (),
    *,
    exact: bool,
) -> str:
    """The text of README.md for an output called `name`; `code` are the model's own Python files.

    `exact` says whether all its numbers are those of the source.
    """
    import yaml

    metadata = _metadata(upstream, repo_id, manifest)
    parameter_table = table_of_outputs(compiled.outputs, compiled.architecture, compiled.layout.traits)
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True).rstrip(),
        "---",
        f"# {name}",
        "",
        f"Made from {_source(manifest['source'])} with qconvert "
        f"{manifest['tool']['version']} (`qconvert {manifest['command']}`).",
        "",
        f"{parameter_table.parameters:,} parameters in {size(parameter_table.nbytes)}, "
        f"{parameter_table.bits_per_weight:.2f} bits per weight over the whole file.",
        "",
        "```",
        *parameter_table_lines(parameter_table),
        "```",
        *_products(compiled),
        *_loss(manifest, exact=exact),
        *_left_out(compiled),
        *_loading(compiled),
        *_own_code(code),
        "",
        "## Recipe",
        "",
        "```yaml",
        yaml.safe_dump(_recipe(manifest), sort_keys=False).rstrip(),
        "```",
        "",
        "`qconvert.json` beside this file holds the hashes of the source's headers and of every tensor, and "
        "the error of each quantized one.",
        "",
    ]
    return "\n".join(lines)


def _source(record: Json) -> str:
    """The source in words: its name, and the base of an adapter."""
    merged = f", merged into `{record['base']}`," if "base" in record else ""
    return f"`{record['name']}`{merged}"


def _recipe(manifest: Json) -> dict[str, Any]:
    """The recipe and what a conversion was asked for, whose scheme counts, without empty fields."""
    asked = {key: value for key, value in manifest.get("conversion", {}).items() if value}
    said = {**manifest["recipe"], **asked}
    return {key: value for key, value in said.items() if value not in (None, [], False)}


def _metadata(upstream: Path | None, repo_id: str | None, manifest: Json) -> dict[str, Any]:
    said = {} if upstream is None else read_front_matter(upstream.parent)
    kept = {key: value for key, value in said.items() if key in _KEPT_KEYS}
    quantized = manifest["totals"]["relative_rms_error"] is not None
    return {
        **kept,
        "library_name": "transformers",
        **({"base_model": repo_id} if repo_id else {}),
        **({"base_model_relation": "quantized"} if repo_id and quantized else {}),
        "tags": ["qconvert", *([manifest["recipe"]["layout"]] if quantized else [])],
    }


def _products(compiled: Compiled) -> list[str]:
    """What loaders multiply in quantized linears."""
    found = products_of(compiled.config, compiled.outputs, compiled.architecture)
    return ["", f"Loaders compute {', '.join(map(str, found))} in the quantized linears."] if found else []


def _loss(manifest: Json, *, exact: bool) -> list[str]:
    error = manifest["totals"]["relative_rms_error"]
    if error is None:
        return ["", "All numbers, or their codes and scales, are those of the source."] if exact else []
    bits = manifest["totals"]["linear_bits_per_weight"]
    lines = [
        "",
        f"Linears: {bits:.2f} bits per weight; relative RMS error of the quantized weights {error:.4f}.",
    ]
    if "statistics" in manifest:
        weighed = manifest["statistics"]
        text = f", measured on `{weighed['dataset']}`" if weighed["dataset"] else ""
        kind = "statistics of their inputs" if "texts" in weighed else "importance matrix"
        what = f"Errors of {weighed['tensors']} tensors are weighed by the {kind}"
        lines.append(f"{what} `{weighed['file']}`{text}.")
    return lines + _not_run(manifest) + _scaling(manifest) + _calibration(manifest)


def _not_run(manifest: Json) -> list[str]:
    """What a layout that has the name of a method does not mean, where the method was not run."""
    layout = manifest["recipe"]["layout"]
    method = registry.traits_of(layout).method
    if not method or "scaling" in manifest or "calibration" in manifest:
        return []
    return [f"{method} names how the codes are stored. No {method} was run: weights are rounded to nearest."]


def _left_out(compiled: Compiled) -> list[str]:
    """Scales of caches that the source has and this layout has no place for."""
    return ["", *(f"Of the source, {line}." for line in compiled.left_out)] if compiled.left_out else []


def _scaling(manifest: Json) -> list[str]:
    """The inputs whose channels are scaled, and what their readers lose less for it."""
    sources = manifest.get("scaling", {}).get("sources")
    if not sources:
        return []
    bounds = [bound for source in sources.values() for bound in source["factors"]]
    inputs = f"{len(sources)} of {manifest['scaling']['inputs']} inputs"
    return [
        f"Columns that read {inputs} are multiplied by {min(bounds):.3g} to {max(bounds):.3g}, and the norms "
        "or linears before them divided (AWQ): the model computes what the source does, and columns that "
        "matter lose less.",
    ]


def _calibration(manifest: Json) -> list[str]:
    """The text on which codes were chosen together, and what that won."""
    if "calibration" not in manifest or manifest["calibration"]["output_error"] is None:
        return []
    calibration = manifest["calibration"]
    error, texts = calibration["output_error"], calibration["text"].get("files", [])
    named = ", ".join(f"`{text['name']}` (SHA-256 {text['sha256'][:12]})" for text in texts)
    how = "error feedback"
    if calibration["method"] == "two-sided":
        how = f"two-sided error feedback (gradients of {calibration['gradient_tokens']:,} tokens)"
    return [
        f"Codes are chosen with {how} on {calibration['tokens']:,} tokens"
        f"{f' of {named}' if named else ''}: the relative error of the linears' outputs on tokens held out "
        f"falls from {error['nearest']:.4f} to {error['written']:.4f}.",
    ]


def _own_code(code: Sequence[str]) -> list[str]:
    """The code that the model brings, which loaders run only where they are told to."""
    if not code:
        return []
    named = ", ".join(f"`{name}`" for name in code)
    return [
        "",
        f"The model has code of its own: {named}, copied from the source as it is, and not run by qconvert. "
        "Loaders that lack the model's class run it with `trust_remote_code=True` (`--trust-remote-code`); "
        "read it first.",
    ]


_PLAIN_LOADS = "transformers (`from_pretrained`) and vLLM load"


def _loading(compiled: Compiled) -> list[str]:
    lines = ["", "## Loading", ""]
    for notice in compiled.notices:
        lines += [notice.sentence, "", "| loader | loads | why |", "|---|---|---|"]
        lines += [f"| {v.loader} | {'yes' if v.loads else 'no'} | {v.why} |" for v in notice.verdicts]
        lines.append("")
    if not compiled.notices:
        claimed = registry.claimed_by(compiled.config)
        lines.append(f"{claimed.traits.loads if claimed else _PLAIN_LOADS} this folder as it is.")
    return lines
