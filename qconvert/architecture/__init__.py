"""Names: what the tensors of a model are called, which role each plays, how families differ."""

from qconvert.architecture.families import FAMILIES
from qconvert.architecture.model import Architecture, Binding, FusedPlace, Place, bind, find_family, shown
from qconvert.architecture.slots import Family, Fusion, Slot

__all__ = [
    "FAMILIES",
    "Architecture",
    "Binding",
    "Family",
    "FusedPlace",
    "Fusion",
    "Place",
    "Slot",
    "bind",
    "find_family",
    "shown",
]
