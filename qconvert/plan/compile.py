"""Compiles a request into a plan: the passes of each container, in their order.

The writing commands differ in their requests alone. Every pass is a pure function in a file of its own
that does nothing where the request does not need it; the facts of the source's bytes were gathered before
(`plan.facts`).
"""

from __future__ import annotations

from qconvert.core.protocols import Layout
from qconvert.models import Binding
from qconvert.plan.facts import SourceFacts
from qconvert.plan.passes.activation_order import undo_activation_order
from qconvert.plan.passes.carry_scales import carry_scales
from qconvert.plan.passes.cast import cast_plain
from qconvert.plan.passes.checks import check_finite, refuse_ggml_blocks, refuse_unscaled_weights
from qconvert.plan.passes.dequantize import dequantize, resolve_nested_scales
from qconvert.plan.passes.fuse import fuse, unfuse
from qconvert.plan.passes.output_config import write_config
from qconvert.plan.passes.output_layout import bring_into_layout, restack_for_class
from qconvert.plan.passes.quantize import quantize
from qconvert.plan.passes.scale_inputs import find_scalable_inputs
from qconvert.plan.passes.tensor_parallel_padding import pad_to_ranks
from qconvert.plan.passes.tie import tie_head
from qconvert.plan.passes.weigh import weigh_errors
from qconvert.plan.plan import copy_of
from qconvert.plan.request import Request
from qconvert.plan.state import Compiled, Pass

FOLDER: tuple[Pass, ...] = (
    refuse_unscaled_weights,
    tie_head,
    resolve_nested_scales,
    restack_for_class,
    unfuse,
    dequantize,
    undo_activation_order,
    pad_to_ranks,
    fuse,
    cast_plain,
    quantize,
    bring_into_layout,
    carry_scales,
    weigh_errors,
    find_scalable_inputs,
    refuse_ggml_blocks,
    check_finite,
    write_config,
)


def compile_request(request: Request, binding: Binding, facts: SourceFacts, layout: Layout) -> Compiled:
    """The plan that fulfils a request, with the config of its output. `layout` is that of the output.

    Raises BadRecipe for a request that contradicts the model, CorruptCheckpoint for tensors that
    contradict its config, UnsupportedModel for a model that the output cannot hold.
    """
    architecture, guess = binding.architecture, binding.architecture.family.guess
    tied = architecture.tied if request.recipe.tie is None else request.recipe.tie
    warnings = (guess,) if guess and not request.is_gguf else ()
    made = Compiled(request, binding, facts, layout, copy_of(binding), architecture, tied, warnings)
    for step in _gguf_file() if request.is_gguf else FOLDER:
        made = step(made)  # and the plan before, which may be large, is let go of
    return made


def _gguf_file() -> tuple[Pass, ...]:
    # Loaded where it is asked for: the names of llama.cpp's graphs take as long as a tiny conversion.
    from qconvert.plan.gguf.encodings import carry_nvfp4_factors, encode_blocks
    from qconvert.plan.gguf.mixture_pass import choose_block_types
    from qconvert.plan.gguf.tensors import order_as_stored, write_gguf_tensors
    from qconvert.plan.passes.other_models import leave_out_other_models

    return (
        refuse_unscaled_weights,
        leave_out_other_models,
        tie_head,
        undo_activation_order,
        write_gguf_tensors,
        choose_block_types,
        order_as_stored,
        encode_blocks,
        carry_scales,
        find_scalable_inputs,
        carry_nvfp4_factors,
        check_finite,
    )
