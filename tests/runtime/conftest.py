"""Tests that run in triton's interpreter have it patch triton's language once for a launch."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from evals.interpreted import patch_once

    patch_once()
