"""Opens what `hub.resolve` found: a model, or an adapter merged into its base."""

from __future__ import annotations

from qconvert.checkpoint.hub import ResolvedModel
from qconvert.checkpoint.open import Checkpoint, open_checkpoint, require_weights
from qconvert.models.declared import Declaration


def open_found(
    found: ResolvedModel, declared: Declaration | None = None, *, undecoded: bool = False
) -> Checkpoint:
    """Open a model where it was found; only headers are read (see `open_checkpoint`)."""
    if found.adapter is None or found.base is None:
        return open_checkpoint(found.path, found.remote, declared, undecoded=undecoded)
    from qconvert.checkpoint.adapted import merge
    from qconvert.formats.huggingface.adapter import open_adapter

    base = open_found(found.base, declared)
    require_weights(base, found.base.name, headers=True)
    return merge(base, open_adapter(found.adapter), found.path)
