"""Writes the tensors of Mamba-2's mixers, whose sizes have other keys in each model's config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from qconvert.core.config_json import divide
from qconvert.models.gguf.declaration import Facts, Written, implying


@dataclass(frozen=True)
class Mamba2Sizes:
    """The keys of config.json that a model has for the sizes of a mixer.

    `inner` gives the width inside of it, and `inner_name` says which keys that comes from.
    """

    heads: str
    groups: str
    state: str
    kernel: str
    inner: Callable[[Facts], int]
    inner_name: str

    def roles(self) -> Mapping[str, Written]:
        """Returns what becomes of each weight of a mixer, in the shapes that llama.cpp's graph wants."""
        return {
            "mamba.dt_bias": Written("ssm_dt", suffix=".bias"),
            "mamba.A_log": Written("ssm_a", "minus_exp", suffix="", shape=self._by_head),
            "mamba.D": Written("ssm_d", suffix="", shape=self._by_head),
            "mamba.conv": Written("ssm_conv1d", shape=self._conv_shape),
            "mamba.in": Written("ssm_in"),
            "mamba.norm": Written("ssm_norm", "transpose", block=self._of_group, shape=self._by_group),
            "mamba.out": Written("ssm_out"),
        }

    def _by_head(self, facts: Facts) -> tuple[int, ...]:
        return facts.size(self.heads), 1

    def _conv_shape(self, facts: Facts) -> tuple[int, ...]:
        states = 2 * facts.size(self.groups) * facts.size(self.state)
        return self.inner(facts) + states, facts.size(self.kernel)

    def _of_group(self, facts: Facts) -> int:
        return divide(self.inner(facts), facts.size(self.groups), self.inner_name, self.groups)

    def _by_group(self, facts: Facts) -> tuple[int, ...]:
        return facts.size(self.groups), self._of_group(facts)


@implying(lambda file: {})
def unlimited_steps(facts: Facts) -> str | None:
    """Refuses limits of time steps, which the graph leaves out; transformers 5 has an object for infinity."""
    limits = facts.settings.get("time_step_limit") or (0.0, math.inf)
    low, high = limits
    if not low and (not isinstance(high, int | float) or high == math.inf):
        return None
    return f"time_step_limit is {limits}, which llama.cpp's {facts.model.arch} leaves out"
