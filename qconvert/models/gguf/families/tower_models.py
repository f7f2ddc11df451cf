"""Lists the declarations of towers by the name of the tower."""

from __future__ import annotations

from collections.abc import Mapping

from qconvert.core.dtypes import Json
from qconvert.models.families import tower_tiles, vision
from qconvert.models.gguf.declaration import GGUFModel
from qconvert.models.gguf.families import towers, towers_newer, towers_tiled

TOWERS: Mapping[str, GGUFModel] = {
    vision.QWEN2_TOWER.name: towers.QWEN2,
    vision.QWEN25_TOWER.name: towers.QWEN25,
    vision.QWEN3_TOWER.name: towers.QWEN3,
    vision.SIGLIP_TOWER.name: towers.GEMMA3,
    vision.GEMMA4_TOWER.name: towers_newer.GEMMA4,
    vision.KIMI_TOWER.name: towers_newer.KIMI,
    vision.KIMI_VL_TOWER.name: towers_newer.KIMI_VL,
    tower_tiles.SMOLVLM_TOWER.name: towers_tiled.SMOLVLM,
    tower_tiles.INTERNVL_TOWER.name: towers_tiled.INTERNVL,
    tower_tiles.INTERNVL_HF_TOWER.name: towers_tiled.INTERNVL,
    tower_tiles.LLAMA4_TOWER.name: towers_tiled.LLAMA4,
}


def tower_model(family: str, config: Json) -> GGUFModel | None:
    """Returns the declaration of a tower of this name, None if it has none."""
    found = TOWERS.get(family)
    return found.variant(config) if found is not None and found.variant is not None else found
