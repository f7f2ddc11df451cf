"""What kernels compute with other instruction sets or threads; triton's interpreter, hastened."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
import torch

from qconvert.quant.simd import processor
from tests.support.instruction_sets import Digests

if os.environ.get("TRITON_INTERPRET") == "1":
    from evals.interpreted import hasten

    hasten()


@pytest.fixture(scope="session")
def digest_with(digests: Digests) -> Callable[[str, str], str]:
    """What `digest()` of a module of tests gives with a set of instructions; this process has the last."""

    def found(choice: str, module: str) -> str:
        if choice == processor.instruction_sets()[-1]:
            return str(import_module(f"tests.runtime.test_{module}").digest())
        return digests.of(choice, f"test_{module}")

    return found


@pytest.fixture
def use_threads() -> Iterator[None]:
    """For a test that sets how many threads torch has."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
