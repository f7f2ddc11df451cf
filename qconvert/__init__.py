"""Converts language-model checkpoints: any checkpoint in, any quantized checkpoint out.

The library in a few names, each loaded when it is first used:

    model = qconvert.open_model("Qwen/Qwen2.5-1.5B-Instruct")
    recipe = qconvert.Recipe(scheme=qconvert.parse_scheme("int4-g128"), fuse=("qkv",))
    job = qconvert.prepare(model, qconvert.Request("quantize", recipe), qconvert.RunOptions(jobs=8))
    result = qconvert.execute(job, Path("out"), lambda done: print(done.unit.output.name))
    qconvert.verify(qconvert.open_model("out").checkpoint, against=model.checkpoint).problems

`job.compiled.plan` is the plan, a value: its units say what is read, done and written. Errors that a user or
a file can cause are `QConvertError`, with a fact and a hint.
"""

from __future__ import annotations

from qconvert.core.version import __version__

TYPE_CHECKING = False  # `typing` and `importlib` are not imported here: a command starts with this
if TYPE_CHECKING:
    from typing import Any

    from qconvert.check.verify import verify
    from qconvert.convert.execute import execute, open_model, prepare
    from qconvert.convert.job import RunOptions
    from qconvert.core.schemes import parse_scheme
    from qconvert.errors import QConvertError
    from qconvert.evaluate.measure import load_runtime, perplexity
    from qconvert.plan.passes.transcode import Target
    from qconvert.plan.recipe import Recipe, Rule
    from qconvert.plan.request import GGUFTarget, Request

# Where each public name is defined.
_DEFINED = {
    "GGUFTarget": "plan.request",
    "QConvertError": "errors",
    "Recipe": "plan.recipe",
    "Request": "plan.request",
    "Rule": "plan.recipe",
    "RunOptions": "convert.job",
    "Target": "plan.passes.transcode",
    "execute": "convert.execute",
    "load_runtime": "evaluate.measure",
    "open_model": "convert.execute",
    "parse_scheme": "core.schemes",
    "perplexity": "evaluate.measure",
    "prepare": "convert.execute",
    "verify": "check.verify",
}

__all__ = [
    "GGUFTarget",
    "QConvertError",
    "Recipe",
    "Request",
    "Rule",
    "RunOptions",
    "Target",
    "__version__",
    "execute",
    "load_runtime",
    "open_model",
    "parse_scheme",
    "perplexity",
    "prepare",
    "verify",
]


def __dir__() -> list[str]:
    """The public names, whether they are loaded yet or not."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    """Load a public name from the module that defines it."""
    if name not in _DEFINED:
        raise AttributeError(f"module 'qconvert' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"qconvert.{_DEFINED[name]}"), name)
