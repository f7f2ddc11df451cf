"""Views arrays that a class stores input-major, as GPT-2's Conv1D does, as the model's [out, in] tensors."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from qconvert.core.encodings import ModelTensor, Unquantized
from qconvert.core.protocols import Layout
from qconvert.formats.layouts.conv1d import InputMajor
from qconvert.models import Architecture


def output_major(tensors: Mapping[str, ModelTensor], architecture: Architecture) -> dict[str, ModelTensor]:
    """The logical view of stored tensors: those stored transposed as [out, in], or as vectors."""
    shapes = architecture.stored_shapes

    def view(tensor: ModelTensor) -> ModelTensor:
        if shapes.get(tensor.name) != tensor.shape or not isinstance(tensor.encoding, Unquantized):
            return tensor
        parameter = architecture.parameter(tensor.name)
        if parameter is not None and parameter.param == "bias":
            return ModelTensor(tensor.name, (prod(tensor.shape),), tensor.encoding)
        *stack, inputs, outputs = tensor.shape
        return ModelTensor(tensor.name, (*stack, outputs, inputs), tensor.encoding)

    return {name: view(tensor) for name, tensor in tensors.items()}


def input_major(layout: Layout, tensors: Mapping[str, ModelTensor], architecture: Architecture) -> InputMajor:
    """The layout of a checkpoint with these stored tensors, and of any output of the same class."""

    def fits(name: str, shape: tuple[int, ...]) -> bool:
        tensor = tensors.get(name)
        return tensor is None or not isinstance(tensor.encoding, Unquantized) or tensor.shape == shape

    stored = {name: shape for name, shape in architecture.stored_shapes.items() if fits(name, shape)}
    parameters = {name: architecture.parameter(name) for name in stored}
    vectors = {
        name for name, parameter in parameters.items() if parameter is not None and parameter.param == "bias"
    }
    return InputMajor(layout, frozenset(stored) - vectors, {name: stored[name][0] for name in vectors})
