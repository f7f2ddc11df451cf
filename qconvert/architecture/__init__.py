"""Names: what the tensors of a model are called, which role each plays, how families differ."""

from qconvert.architecture.binding import Binding, bind
from qconvert.architecture.families import FAMILIES
from qconvert.architecture.model import Architecture, FusedPlace, Place, Run, find_family
from qconvert.architecture.slots import Family, Fusion, Slot

__all__ = [
    "FAMILIES",
    "Architecture",
    "Binding",
    "Family",
    "FusedPlace",
    "Fusion",
    "Place",
    "Run",
    "Slot",
    "bind",
    "find_family",
]
