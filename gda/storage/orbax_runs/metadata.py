"""The metadata of an Orbax run: the leaves of its tree, and their structure. Reads no files.

``_METADATA`` is JSON. ``tree_metadata`` has an entry for each leaf: ``key_metadata``, the keys of
its path, each with ``key_type`` 1 in a sequence or 2 in a mapping, and ``value_metadata``.
``use_ocdbt`` and ``store_array_data_equal_to_fill_value`` are missing in older releases. Tuples are
sequences, named tuples and dataclasses are mappings. The file may be damaged, or hostile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from gda.layout.strict_json import parse_json

T = TypeVar("T")
Key = str | int  # of a mapping or of a sequence

# The leaves that are containers without elements, or None, which have no data.
EMPTY: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "NamedTuple": lambda: None,
    "Dict": dict,
    "List": list,
    "Tuple": tuple,
}
ARRAYS = ("jax.Array", "np.ndarray")

_DEEPEST = 200
_SEQUENCE, _MAPPING = 1, 2


class OrbaxLeaf(NamedTuple):
    """A leaf of a run."""

    path: tuple[Key, ...]
    kind: str  # of EMPTY or ARRAYS, "scalar", "string", or another
    is_written: bool

    @property
    def name(self) -> str:
        """Name of its data in the run."""
        return ".".join(map(str, self.path))


class OrbaxTree(NamedTuple):
    """The leaves of a run, and the format of their data."""

    leaves: list[OrbaxLeaf]
    uses_ocdbt: bool | None  # None in older releases, which do not say it
    uses_zarr3: bool
    has_zeros: bool  # blocks of zeros are written too


def parse_tree(text: bytes) -> OrbaxTree:
    """Return the content of ``_METADATA``; ``ValueError`` says the fault in it."""
    content = _of(dict, parse_json(text.decode()), "it")
    entries = _of(dict, content.get("tree_metadata"), "tree_metadata")
    leaves = [_leaf(name, entry) for name, entry in entries.items()]
    return OrbaxTree(
        leaves,
        _flag(content, "use_ocdbt", None),
        _flag(content, "use_zarr3", False),
        _flag(content, "store_array_data_equal_to_fill_value", False),
    )


def parse_strings(text: bytes) -> dict[str, str]:
    """Return the content of ``_strings.json``: the strings by the names of their leaves."""
    content = _of(dict, parse_json(text.decode()), "it")
    return {name: _of(str, value, repr(name)) for name, value in content.items()}


def parse_key_kinds(text: bytes) -> dict[str, str | None]:
    """Return PRNG key implementations by name, or ``None``, from a file of ``array_metadatas``."""
    content = _of(dict, parse_json(text.decode()), "it")
    found: dict[str, str | None] = {}
    for each in _of(list, content.get("array_metadatas"), "array_metadatas"):
        array = _of(dict, _of(dict, each, "an array").get("array_metadata"), "array_metadata")
        more = _of(dict, array.get("ext_metadata") or {}, "ext_metadata")
        kind = more.get("random_key_impl")
        name = _of(str, array.get("param_name"), "param_name")
        found[name] = None if kind is None else _of(str, kind, "random_key_impl")
    return found


def tree_of(leaves: Iterable[OrbaxLeaf], value_of: Callable[[OrbaxLeaf], Any]) -> Any:
    """Return the tree of the leaves' values: lists for sequences, dicts for all other nodes."""

    def node_at(leaves: list[OrbaxLeaf], depth: int) -> Any:
        below: dict[Key, list[OrbaxLeaf]] = {}
        # A later save of some leaves does not remove the empty node of an earlier one.
        own = [leaf for leaf in leaves if len(leaf.path) == depth]
        for leaf in leaves:
            if len(leaf.path) > depth:
                below.setdefault(leaf.path[depth], []).append(leaf)
                if own and own[0].kind not in EMPTY:
                    raise ValueError(f"leaf {own[0].name!r} is also a node, above {leaf.name!r}")
        if len(own) > 1:
            raise ValueError(f"leaf {own[0].name!r} is in it twice")
        if not below:
            return value_of(own[0])
        if not any(isinstance(key, int) for key in below):
            return {key: node_at(each, depth + 1) for key, each in below.items()}
        if {*below} != {*range(len(below))}:
            keys = ", ".join(sorted(map(str, below))[:5])
            raise ValueError(f"a sequence has the keys {keys}, which are not 0, 1, 2, ...")
        return [node_at(below[number], depth + 1) for number in range(len(below))]

    given = [*leaves]
    return node_at(given, 0) if given else {}


def _leaf(name: str, entry: Any) -> OrbaxLeaf:
    try:
        entry = _of(dict, entry, "the entry")
        keys = _of(list, entry.get("key_metadata"), "key_metadata")
        if len(keys) > _DEEPEST:
            raise ValueError(f"it is {len(keys)} levels deep; expected are at most {_DEEPEST}")
        value = _of(dict, entry.get("value_metadata"), "value_metadata")
        kind = _of(str, value.get("value_type"), "value_type")
        is_written = not _flag(value, "skip_deserialize", False)
        leaf = OrbaxLeaf(tuple(map(_key, keys)), kind, is_written)
        if is_written and kind not in EMPTY:
            _check_name(leaf.name)
    except ValueError as error:
        raise ValueError(f"leaf {name!r:.200}: {error}") from None
    return leaf


def _key(given: Any) -> Key:
    given = _of(dict, given, "a key")
    key, kind = _of(str, given.get("key"), "key"), given.get("key_type")
    if kind == _MAPPING:
        return key
    # A longer number is no place in a sequence, and slow to parse.
    is_number = key.isascii() and key.isdigit() and len(key) < 10
    if kind == _SEQUENCE and is_number and str(int(key)) == key:
        return int(key)
    raise ValueError(f"key {key!r:.80} of type {kind!r:.80} is neither in a mapping nor a sequence")


def _check_name(name: str) -> None:
    """Raise ``ValueError`` for a name that is no path inside the run."""
    # A run of a single array has no name for it.
    if "\0" in name or (name and {"", ".", ".."} & {*name.split("/")}):
        raise ValueError(f"its data would be at {name!r:.200}, which may lead out of the run")


def _flag(content: dict[str, Any], name: str, default: T) -> bool | T:
    value = content.get(name)
    return default if value is None else _of(bool, value, name)


def _of(kind: type[T], value: Any, name: str) -> T:
    if type(value) is not kind:
        raise ValueError(f"{name} is {value!r:.80}; expected is a {kind.__name__}")
    return value
