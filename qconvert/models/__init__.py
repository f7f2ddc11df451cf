"""Names: what the tensors of a model are called, which role each plays, how families differ."""

from qconvert.models.architecture import Architecture, FusedParameter, Parameter, Run, find_family
from qconvert.models.binding import Binding, bind
from qconvert.models.families import FAMILIES
from qconvert.models.parameters import Family, Fusion, ParameterTemplate

__all__ = [
    "FAMILIES",
    "Architecture",
    "Binding",
    "Family",
    "FusedParameter",
    "Fusion",
    "Parameter",
    "ParameterTemplate",
    "Run",
    "bind",
    "find_family",
]
