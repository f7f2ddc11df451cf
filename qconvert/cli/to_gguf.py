"""`qconvert to-gguf`: a GGUF file of any llama.cpp type, in one step."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from qconvert.cli.exit_codes import after_the_work, typed
from qconvert.cli.options import (
    SIZE,
    available_cores,
    dry_run_option,
    examples,
    jobs_option,
    json_option,
    memory_option,
    nonfinite_option,
    revision_option,
    verify_option,
    written_option,
)
from qconvert.errors import BadRecipe

if TYPE_CHECKING:
    from qconvert.checkpoint.open import Checkpoint
    from qconvert.cli import run_conversion
    from qconvert.convert.gguf_file import GGUFJob, GGUFMade
    from qconvert.core.dtypes import Json
    from qconvert.core.ggml_types import GGMLType
    from qconvert.formats.tokenizers.to_gguf import GGUFTokenizer
    from qconvert.plan.gguf.compile import GGUFWish


@dataclass(frozen=True, slots=True)
class Flags:
    """The values of the command's options."""

    file_type: str
    out: Path | None
    tensor_types: tuple[str, ...]
    token_embedding_type: str | None
    output_tensor_type: str | None
    pure: bool
    fallback: bool
    imatrix: Path | None
    split_max_size: int | None
    pre_tokenizer: str | None
    overwrite: bool
    dry_run: bool
    as_json: bool
    quiet: bool
    verify: bool
    jobs: int | None
    max_memory: int
    revision: str | None
    allow_nonfinite: bool
    allow_requantize: bool
    undo_act_order: bool = False

    @classmethod
    def of_type(cls, file_type: str, common: run_conversion.Flags) -> Flags:
        """The flags of a call from within: a type, what all writing commands share, and defaults."""
        return cls(
            file_type=file_type,
            out=common.out,
            tensor_types=(),
            token_embedding_type=None,
            output_tensor_type=None,
            pure=False,
            fallback=True,
            imatrix=None,
            split_max_size=None,
            pre_tokenizer=None,
            overwrite=common.overwrite,
            dry_run=common.dry_run,
            as_json=common.as_json,
            quiet=common.quiet,
            verify=common.verify,
            jobs=common.jobs,
            max_memory=common.max_memory,
            revision=common.revision,
            allow_nonfinite=common.allow_nonfinite,
            allow_requantize=False,
        )


@click.command("to-gguf", epilog=examples("qconvert to-gguf Qwen/Qwen2.5-1.5B-Instruct --type q4_k_m"))
@click.argument("model", required=False)
@click.option(
    "--type",
    "file_type",
    required=True,
    metavar="TYPE",
    help="Type of the file: q4_k_m, q8_0, ...; `list` shows all, `keep` keeps codes.",
)
@click.option(
    "--tensor-type",
    "tensor_types",
    multiple=True,
    metavar="PATTERN=TYPE",
    help="Another type for tensors whose GGUF names the regular expression is found in.",
)
@click.option("--token-embedding-type", metavar="TYPE", help="Another type for the embedding.")
@click.option("--output-tensor-type", metavar="TYPE", help="Another type for the head.")
@click.option("--pure", is_flag=True, help="The base type throughout, no mixture.")
@click.option(
    "--fallback/--no-fallback",
    default=True,
    show_default=True,
    help="Where blocks do not divide a row, take a bigger type, or stop.",
)
@click.option(
    "--imatrix", type=click.Path(path_type=Path), metavar="FILE", help="Importance matrix (GGUF or .dat)."
)
@click.option("--allow-requantize", is_flag=True, help="Quantize again what already is; that loses twice.")
@click.option("--split-max-size", type=SIZE, help="Write numbered parts of at most this size.")
@click.option(
    "--pre-tokenizer",
    metavar="NAME",
    help="llama.cpp's name of the pre-tokenizer, where it is not recognised.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    show_default="by GGUF's convention",
    help="Output file.",
)
@click.option("--overwrite", is_flag=True, help="Replace the output file.")
@dry_run_option
@json_option
@written_option
@verify_option
@jobs_option
@memory_option
@revision_option
@nonfinite_option
def command(model: str | None, **values: Any) -> None:
    """Write MODEL as a GGUF file for llama.cpp, Ollama and their kin.

    Straight from the shards: no 16-bit GGUF in between. Every tensor's bytes equal those of
    llama.cpp's own converter followed by llama-quantize. A model that its graphs would compute
    otherwise is refused.
    """
    flags = Flags(**values)
    if flags.file_type.lower() == "list":
        _print_types()
        return
    if model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    write_gguf(model, flags)


def write_gguf(model: str, flags: Flags) -> None:
    """Carry out the command and print its result."""
    from qconvert.formats.gguf.writer import check_target

    with typed():
        wish = _wish(flags)
    if flags.out and not flags.dry_run:  # before a download
        check_target(flags.out, overwrite=flags.overwrite, sources=[Path(model)])
    job = prepare(model, wish, flags)
    _warn(job, flags)
    out = flags.out or Path(job.identity.file_name(job.draft.file_type.name))
    files = job.files(out.name, flags.split_max_size)
    out = out.with_name(files[0].name)
    if flags.dry_run:
        _report(job, out, flags, None, 0.0)
        return
    for file in files:
        check_target(out.with_name(file.name), overwrite=flags.overwrite, sources=[job.checkpoint.path])
    _carry_out(job, out, files, flags)


def _carry_out(job: GGUFJob, out: Path, files: Any, flags: Flags) -> None:
    from qconvert.cli.progress import compile_kernels, progress
    from qconvert.convert.gguf_file import convert_gguf

    talks = not (flags.quiet or flags.as_json)
    compile_kernels(job.draft.plan, talks=talks)
    started = time.perf_counter()
    with progress(job.draft.plan, talks=talks) as listen:
        made = convert_gguf(job, out, files, listen)
    with after_the_work():
        _report(job, out, flags, made, time.perf_counter() - started)


def prepare(model: str, wish: GGUFWish, flags: Flags) -> GGUFJob:
    """Open the source, recognise its tokenizer and draft the file; nothing is written."""
    from qconvert.check.compare import difference
    from qconvert.checkpoint.hub import resolve
    from qconvert.checkpoint.open import open_checkpoint
    from qconvert.convert.execute import Limits
    from qconvert.convert.gguf_file import GGUFJob, check_encoders, check_name
    from qconvert.formats.gguf.imatrix import read_imatrix
    from qconvert.plan.gguf.compile import draft_gguf

    resolved = resolve(model, revision=flags.revision)
    checkpoint = open_checkpoint(resolved.path)
    binding = checkpoint.bind()
    imatrix = read_imatrix(flags.imatrix) if flags.imatrix else None
    wish = replace(wish, importance=imatrix.means) if imatrix else wish
    draft = draft_gguf(
        binding,
        wish,
        compare=lambda a, b: difference(checkpoint.reader, a, checkpoint.reader, b),
        groups_of=checkpoint.groups_of_columns,
    )
    check_encoders(draft)
    tokenizer = _tokenizer(checkpoint, flags)
    limits = Limits(
        flags.jobs or available_cores(),
        flags.max_memory,
        None,
        verify=flags.verify,
        overwrite=flags.overwrite,
    )
    job = GGUFJob(checkpoint, wish, draft, tokenizer, resolved.name, limits, imatrix)
    check_name(job)
    return job


def _tokenizer(checkpoint: Checkpoint, flags: Flags) -> GGUFTokenizer:
    """The tokenizer of a folder; that of a GGUF file stays as it is."""
    from qconvert.checkpoint.gguf_model import GGUFModel
    from qconvert.formats.tokenizers.to_gguf import read_tokenizer

    if isinstance(checkpoint.files, GGUFModel):
        if flags.pre_tokenizer:
            raise BadRecipe("--pre-tokenizer: the tokenizer of a GGUF file stays as it is", "leave it out")
        return checkpoint.files.tokenizer
    embed = checkpoint.architecture.table("embed")
    assert embed is not None
    return read_tokenizer(checkpoint.path, embed.shape[0], checkpoint.config, flags.pre_tokenizer)


def _wish(flags: Flags) -> GGUFWish:
    """What the options ask for, but for the importance matrix. Raises BadRecipe for what cannot be."""
    from qconvert.formats.tokenizers.pretokenizers import known_pre_tokenizer
    from qconvert.plan.gguf.compile import KEEP, GGUFWish
    from qconvert.plan.gguf.mixture import find_file_type

    if flags.out and flags.out.suffix != ".gguf":
        raise BadRecipe(f"{flags.out}: does not end in .gguf", f"write -o {flags.out}.gguf")
    if flags.pre_tokenizer is not None:
        known_pre_tokenizer(flags.pre_tokenizer)
    if flags.file_type != KEEP:
        _require_written(find_file_type(flags.file_type).base)
    embedding, head = flags.token_embedding_type, flags.output_tensor_type
    return GGUFWish(
        flags.file_type,
        tensor_types=tuple(_override(text) for text in flags.tensor_types),
        token_embedding_type=_written(embedding) if embedding else None,
        output_tensor_type=_written(head) if head else None,
        pure=flags.pure,
        fallback=flags.fallback,
        allow_nonfinite=flags.allow_nonfinite,
        allow_requantize=flags.allow_requantize,
        undo_act_order=flags.undo_act_order,
    )


def _override(text: str) -> tuple[str, GGMLType]:
    """Read `PATTERN=TYPE` as given to --tensor-type."""
    from qconvert.plan.gguf.mixture import pattern_of

    pattern, equals, type_ = text.rpartition("=")
    if not equals or not pattern:
        raise BadRecipe(f"--tensor-type {text!r}: no '='", "write PATTERN=TYPE, for example ffn_down=q6_k")
    pattern_of(pattern)
    return pattern, _written(type_)


def _written(text: str) -> GGMLType:
    from qconvert.core.ggml_types import parse_ggml_type

    kind = parse_ggml_type(text)
    _require_written(kind)
    return kind


def _require_written(kind: GGMLType) -> None:
    from qconvert.core.ggml_types import WRITTEN

    if kind.is_quantized and kind.name not in WRITTEN:
        known = ", ".join(name.lower() for name in sorted(WRITTEN))
        raise BadRecipe(f"type {kind.label}: is read here, but not written", f"f32, f16, bf16, or {known}")


def _print_types() -> None:
    from qconvert.core.ggml_types import WRITTEN
    from qconvert.plan.gguf.mixture import FILE_TYPES
    from qconvert.report.tables import table

    written = [t for t in FILE_TYPES.values() if not t.base.is_quantized or t.base.name in WRITTEN]
    rows = [[t.name.lower(), t.base.label, f"{t.base.bits_per_weight:.2f}"] for t in written]
    click.echo("\n".join(table(["type", "base", "bpw of base"], rows, left=2)))


def _warn(job: GGUFJob, flags: Flags) -> None:
    if flags.as_json:
        return
    for warning in (*job.checkpoint.files.warnings, *job.draft.warnings, *job.tokenizer.warnings):
        click.echo(f"Warning: {warning}", err=True)


def _described(job: GGUFJob, out: Path) -> Json:
    by_type: dict[str, list[int]] = {}
    for tensor in job.tensors:
        entry = by_type.setdefault(tensor.type.label, [0, 0, 0])
        entry[0] += 1
        entry[1] += tensor.nbytes * tensor.type.block // tensor.type.block_bytes
        entry[2] += tensor.nbytes
    rows = [
        {"type": label, "tensors": tensors, "parameters": count, "bytes": nbytes}
        for label, (tensors, count, nbytes) in by_type.items()
    ]
    parameters = sum(count for _, count, _ in by_type.values())
    nbytes = sum(nbytes for _, _, nbytes in by_type.values())
    return {
        "out": str(out),
        "file_type": job.draft.file_type.name,
        "types": rows,
        "parameters": parameters,
        "bytes": nbytes,
        "bits_per_weight": 8 * nbytes / parameters,
        "substituted": job.draft.substituted,
    }


def _report(job: GGUFJob, out: Path, flags: Flags, made: GGUFMade | None, seconds: float) -> None:
    from qconvert.convert.manifest import finite
    from qconvert.report.tables import size, table

    found = _described(job, out)
    if flags.as_json:
        result = {"schema": 1, "dry_run": flags.dry_run, **found, "seconds": round(seconds, 3)}
        kept = (
            {name: finite(steps) if steps else "exact" for name, steps in made.kept.items()} if made else {}
        )
        certificates = _certificates(job, made) if made else {}
        hashes = dict(made.hashes.files) if made else {}
        click.echo(json.dumps({**result, "kept": kept, "certificates": certificates, "sha256": hashes}))
        return
    if found["substituted"]:
        base = job.draft.file_type.base.label
        click.echo(
            f"Warning: {len(found['substituted'])} tensors have rows that {base}'s blocks do not divide and "
            f"got a bigger type, for example {found['substituted'][0]}; --no-fallback makes this an error",
            err=True,
        )
    if flags.quiet:
        click.echo(str(out))
        return
    rows = [
        [r["type"], str(r["tensors"]), f"{r['parameters']:,}", size(r["bytes"]), _bpw(r)]
        for r in found["types"]
    ]
    total = ["total", str(len(job.tensors)), f"{found['parameters']:,}", size(found["bytes"]), _bpw(found)]
    click.echo(f"{job.model_name}  ->  {out}")
    click.echo("\n".join(table(["type", "tensors", "parameters", "bytes", "bpw"], [*rows, total])))
    if made is None:
        click.echo("dry run: nothing was written", err=True)
    else:
        checked = "verified" if flags.verify else "not verified"
        click.echo(f"done in {seconds:.1f} s, {_certificate(job, made)}{checked}", err=True)


def _certificates(job: GGUFJob, made: GGUFMade) -> dict[str, int]:
    """How many tensors are exact, measured, quantized, requantized and so on."""
    from qconvert.convert.manifest import certificate_of

    units = job.draft.plan.units
    found = Counter(certificate_of(unit, made.kept.get(unit.output.name, 0.0)) for unit in units)
    return dict(sorted(found.items()))


def _certificate(job: GGUFJob, made: GGUFMade) -> str:
    """What became of a source that was quantized already: `exact, `, or how many tensors are what."""
    if job.checkpoint.quantization is None:
        return ""
    found = _certificates(job, made)
    if set(found) == {"exact"}:
        return "exact, "
    worst = max(made.kept.values(), default=0.0)
    measured = f" (at most {worst:.2g} steps)" if worst else ""
    return " + ".join(f"{count} {kind}" for kind, count in found.items()) + f"{measured}, "


def _bpw(entry: Json) -> str:
    return f"{8 * entry['bytes'] / entry['parameters']:.2f}"
