"""Fits a calibrated conversion to the memory and the disk it may take, before anything is read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from qconvert.calibrate.activation_file import scratch_folder
from qconvert.calibrate.calibration import Calibration
from qconvert.calibrate.fit import fitted
from qconvert.calibrate.memory import Needs, Work, needs
from qconvert.calibrate.memory_limit import memory_limit
from qconvert.checkpoint.open import Checkpoint
from qconvert.convert.calibrated import is_followed
from qconvert.convert.job import Job, RunOptions
from qconvert.core.dtypes import DType
from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.errors import DiskFull
from qconvert.formats.io.local_file import amount
from qconvert.plan.plan import Plan
from qconvert.plan.request import GGUFTarget, Request
from qconvert.quant.simd.lanes import LANES
from qconvert.runtime.config import DecoderConfig


def fit(
    checkpoint: Checkpoint, calibration: Calibration, request: Request, options: RunOptions
) -> Calibration:
    """The calibration with what it must save to keep within the run's memory; BadRecipe where it cannot."""
    limit = memory_limit(options.process_memory)
    limit = replace(limit, process=limit.process + options.sending)
    savings, _ = fitted(_work(checkpoint, calibration, request, options), limit)
    return replace(calibration, savings=savings)


def needed(job: Job) -> Needs:
    """What a job's calibration takes of memory, beside the process, and of disk."""
    assert job.calibration is not None
    work = _work(job.source.checkpoint, job.calibration, job.compiled.request, job.options)
    return needs(replace(work, writes_table=_writes_table(job.compiled.plan)), job.calibration.savings)


def scratch_for(job: Job, out: Path) -> Path:
    """The folder for a job's activations; DiskFull where its disk has not enough room for them."""
    folder, nbytes = scratch_folder(out), needed(job).disk
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise DiskFull(
            f"{folder}: activations of the text need {amount(nbytes)} of disk, {amount(free)} free",
            "free some space, set TMPDIR to a folder on another disk, or ask for fewer --tokens",
        )
    return folder


def _work(checkpoint: Checkpoint, calibration: Calibration, request: Request, options: RunOptions) -> Work:
    config = DecoderConfig.of(checkpoint.architecture)
    held = max(map(_held_bytes, checkpoint.tensors.values()))
    return Work(config, calibration, options.jobs, held, eights=_has_lattices(request))


def _has_lattices(request: Request) -> bool:
    """Whether weights may become IQ1, IQ2 or IQ3, of which eight columns get their codes at once."""
    target = request.target
    if not isinstance(target, GGUFTarget):
        return False
    others = [kind for _, kind in target.tensor_types] + [
        target.output_tensor_type,
        target.token_embedding_type,
    ]
    names = [target.file_type, *(kind.name for kind in others if kind is not None)]
    return any(name.lower().startswith(("iq1", "iq2", "iq3")) for name in names)


def _held_bytes(tensor: ModelTensor) -> float:
    """What a weight of a linear takes as a decoder of float32 holds it: bf16 as it is, or float32."""
    if len(tensor.shape) != 2 or not isinstance(tensor.encoding, Unquantized):
        return 2.0
    return 2.0 if tensor.encoding.dtype is DType.BF16 and tensor.width % LANES == 0 else 4.0


def _writes_table(plan: Plan) -> bool:
    """Whether layers are to read what a quantized embedding gives."""
    outside = (unit for unit in plan.units if all(key.layer is None for key in unit.statistics))
    return any(is_followed(unit) for unit in outside)
