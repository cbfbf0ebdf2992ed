"""The public API as text: a line for each name, in order, with the members of a class below it.
The stable names are the first part, and the provisional ones the second: see `docs/stable.md`.

``python tests/public_api.py > tests/public_api.txt`` records it, and ``tests/test_names.py``
compares, so that every change of the API is seen in a diff.
Types are written without their modules, so that the text is the same under all versions of Python
and JAX, and for every import of a name.
"""

import inspect
import re
import typing
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import gda

MODULES = [
    "gda",
    "gda.checkpoint",
    "gda.compat",
    "gda.launch",
    "gda.show",
    "gda.storage",
    "gda.testing",
    "gda.testing.strategies",
]


_PAGE = (Path(__file__).parents[1] / "docs" / "stable.md").read_text(encoding="utf-8")
STABLE = set(re.findall(r"`(gda(?:\.\w+)*)`", _PAGE.split("\n## ")[1]))


def public_names(module: ModuleType) -> list[str]:
    """Return the public names of a module, with the types that the list of gda omits."""
    return [*gda._MODULE_OF] if module is gda else module.__all__


def public_api() -> Iterator[str]:
    """Yield the lines."""
    yield "# Stable"
    yield from _part(stable=True)
    yield "# Provisional"
    yield from _part(stable=False)


def is_stable(module_name: str, name: str) -> bool:
    """Return True if a name, or all names of its module, or some of a module, are stable."""
    full = f"{module_name}.{name}"
    within = any(each.startswith(f"{full}.") for each in STABLE)
    return within or not STABLE.isdisjoint({module_name, full})


def _part(*, stable: bool) -> Iterator[str]:
    for module_name in MODULES:
        module = gda if module_name == "gda" else attrgetter(module_name[4:])(gda)
        for name in public_names(module):
            if is_stable(module_name, name) != stable:
                continue
            value = getattr(module, name)
            if isinstance(value, ModuleType):
                yield f"module {module_name}.{name}"
                if callable(value):
                    yield from _function(f"{module_name}.{name}", value)
            elif inspect.isclass(value):
                # That of an enumeration is Python's, and another in each version of it.
                signature = "" if issubclass(value, Enum) else _signature(value)
                yield f"class {module_name}.{name}{_bases(value)}{signature}"
                yield from (f"    {line}" for line in _members(value))
            elif callable(value) and not isinstance(value, type(tuple[int])):
                yield from _function(f"{module_name}.{name}", value)
            else:
                yield f"value {module_name}.{name} = {value}"


def _bases(kind: type) -> str:
    names = [base.__name__ for base in kind.__mro__[1:-1] if not _is_of_gda(base)]
    return f" < {', '.join(names)}" if names else ""


def _is_of_gda(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "gda"


def _members(kind: type) -> Iterator[str]:
    """Yield the public members that gda gives a class, its constructor's overloads first."""
    for name in ("__init__", "__new__"):
        constructor = vars(kind).get(name, _members)
        constructor = getattr(constructor, "__func__", constructor)
        yield from (f"overload {_signature(one)}" for one in typing.get_overloads(constructor))
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if _is_of_gda(base):
            found |= dict.fromkeys(base.__annotations__)
            # The attributes that a container has of jax.Array depend on the version of JAX.
            found |= {
                name: value
                for name, value in vars(base).items()
                if "of the ``jax.Array`` inside" not in (value.__doc__ or "")
            }
    # Those of a dataclass or a named tuple are the parameters of its constructor, which are shown.
    fields = getattr(kind, "__match_args__", ())
    for name in sorted(name for name in found if not name.startswith("_")):
        member = found[name]
        if isinstance(member, property | cached_property):
            get = member.fget if isinstance(member, property) else member.func
            yield f"property {name}: {_text(inspect.signature(get).return_annotation, kind)}"
        elif callable(getattr(kind, name, None)):
            method = getattr(kind, name)
            static = f"{type(member).__name__} " * isinstance(member, classmethod | staticmethod)
            yield from _function(static + name, method, kind)
        elif name not in fields:
            yield f"attribute {name}"


def _function(name: str, function: Any, kind: type | None = None) -> Iterator[str]:
    yield f"def {name}{_signature(function, kind)}"
    # `typing.overload` knows the function by the module where it is written.
    for one in typing.get_overloads(function) or typing.get_overloads(inspect.unwrap(function)):
        bound = one.__get__(None, kind) if isinstance(one, classmethod) else one
        yield f"    overload {_signature(bound, kind)}"


def _signature(function: Any, kind: type | None = None) -> str:
    try:
        signature = inspect.signature(function)
    except ValueError:  # an exception as Python has it
        return ""
    parameters = [
        each.replace(annotation=_text(each.annotation, kind))
        for each in signature.parameters.values()
    ]
    returned = _text(signature.return_annotation, kind)
    shown = str(signature.replace(parameters=parameters, return_annotation=returned))
    return re.sub(r" at 0x\w+", "", shown)


class _Text(str):
    __slots__ = ()
    __repr__ = str.__str__  # a signature shows a string in quotes


def _text(annotation: Any, kind: type | None) -> Any:
    """Return an annotation as it is written, without the modules of its names."""
    if annotation is inspect.Signature.empty:
        return annotation
    if isinstance(annotation, typing.ForwardRef):
        annotation = annotation.__forward_arg__
    if not isinstance(annotation, str):
        annotation = inspect.formatannotation(annotation)
    if kind is not None:
        annotation = re.sub(r"\bSelf\b", kind.__name__, annotation)
    return _Text(re.sub(r"\b([a-z]\w*\.)+", "", annotation))


if __name__ == "__main__":
    print(*public_api(), sep="\n")
