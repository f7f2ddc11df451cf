"""Makes records of plain data that was read from JSON: the inverse of `dataclasses.asdict`."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_plain(kind: type[T], data: Any) -> T:
    """The value of a type that `data` is the plain form of: dataclasses, tuples, dicts, None and scalars.

    Fields without a value take their defaults; keys that are no fields are ignored. Raises ValueError for
    data of another shape.
    """
    made: T = _value(kind, data)
    return made


def _value(kind: Any, data: Any) -> Any:
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):
        (only,) = [each for each in inner if each is not NoneType]
        return None if data is None and NoneType in inner else _value(only, data)
    if outer is tuple:
        return tuple(_value(inner[0], each) for each in _checked((list, tuple), data))
    if outer is dict:
        return {str(key): _value(inner[1], value) for key, value in _checked((dict,), data).items()}
    if is_dataclass(kind):
        return _record(kind, _checked((dict,), data))
    if kind is Any:
        return data
    return _checked((kind,), float(data) if kind is float and type(data) is int else data)


def _checked(kinds: tuple[type, ...], data: Any) -> Any:
    """The data, which must be of one of these types; True is no number."""
    if type(data) not in kinds:
        raise ValueError(f"{data!r:.40} is no {kinds[0].__name__}")
    return data


def _record(kind: Any, data: Any) -> Any:
    hints, values = get_type_hints(kind), {}
    for field in fields(kind):
        if field.name in data:
            values[field.name] = _value(hints[field.name], data[field.name])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ValueError(f"{kind.__name__} without {field.name}")
    return kind(**values)
