"""Declares model families: the names, roles and shapes of their tensors, in HF folders and in GGUF files."""

from qconvert.models.architecture import Architecture
from qconvert.models.binding import Binding, bind
from qconvert.models.expanded import FusedParameter, Parameter, Run
from qconvert.models.families import FAMILIES
from qconvert.models.family_of import find_family
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
