"""The model of a folder: safetensors files, the index of several, and how new ones replace them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gda.storage.new_files import create, move
from gda.storage.safetensors import open_safetensors
from gda.storage.safetensors_format import (
    FileLayout,
    Tensor,
    check_header,
    file_of,
    read_object,
)
from gda.storage.system_calls import sync_folder

MODEL = "model.safetensors"
INDEX = "model.safetensors.index.json"

_PART = re.compile(r"model-(?:([0-9a-f]{16})-)?\d{5,}-of-\d{5,}\.safetensors")
_REPLACED = "replaces"  # in the metadata of an index: files that are being removed


def files_of_model(
    tensors: Sequence[Tensor], most_bytes: int, metadata: Mapping[str, str] | None
) -> list[FileLayout]:
    """Return the files of a model, named as in published models.

    Files are filled in the order of the tensors. A tensor of more than ``most_bytes`` has a file of
    its own. ``ValueError`` if a header, or the index, would be larger than readers accept.
    """
    groups = _groups(tensors, most_bytes)
    if len(groups) == 1:
        return [file_of(MODEL, groups[0], metadata)]
    names = _part_names(len(groups))
    files = [file_of(*each, metadata) for each in zip(names, groups, strict=True)]
    check_header(_index_of(files, _part_names(len(groups), "0" * 16)), INDEX)
    return files


def _groups(tensors: Sequence[Tensor], most_bytes: int) -> list[list[Tensor]]:
    groups: list[list[Tensor]] = []
    open_group: list[Tensor] = []
    filled = 0
    for tensor in tensors:
        if tensor.nbytes > most_bytes:
            groups.append([tensor])
            continue
        if filled + tensor.nbytes > most_bytes:
            groups.append(open_group)
            open_group, filled = [], 0
        open_group.append(tensor)
        filled += tensor.nbytes
    return [*groups, open_group] if open_group or not groups else groups


def _part_names(count: int, token: str = "") -> list[str]:
    model = f"model-{token}" if token else "model"
    return [f"{model}-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]


def _index_of(
    files: Iterable[FileLayout], names: Iterable[str], replaced: Iterable[str] = ()
) -> bytes:
    named = list(zip(files, names, strict=True))
    nbytes = sum(file.entries[-1].stop for file, _ in named if file.entries)
    weight_map = {entry.name: name for file, name in named for entry in file.entries}
    return _index(weight_map, nbytes, replaced)


def _index(weight_map: Mapping[str, str], nbytes: int, replaced: Iterable[str] = ()) -> bytes:
    metadata: dict[str, Any] = {"total_size": nbytes}
    if names := sorted(replaced):
        metadata[_REPLACED] = names
    content = {"metadata": metadata, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def _read_index(index: Path) -> tuple[set[str], set[str]]:
    """Return the files that an index, if it can be read, names, and those that it replaces."""
    try:
        content = read_object(index)
    except (FileNotFoundError, ValueError):
        return set(), set()
    files, metadata = content.get("weight_map"), content.get("metadata")
    named = files.values() if isinstance(files, dict) else ()
    replaced = metadata.get(_REPLACED) if isinstance(metadata, dict) else ()
    return (
        {file for file in named if isinstance(file, str)},
        {*filter(_is_of_model, replaced if isinstance(replaced, list) else ())},
    )


def _is_of_model(name: Any) -> bool:
    return isinstance(name, str) and (name == MODEL or _PART.fullmatch(name) is not None)


def replace_model(partial: Path, folder: Path, files: Sequence[FileLayout]) -> None:
    """Put the files of a save in place of the model of a folder.

    At every moment a reader that follows the index, if there is one, sees the old model or the new
    one, each whole:

    - Several files get names that no file has. While they come, the index leads to the old model;
      where there is none, to the new one, so that it is refused until it is whole. Then the new
      index takes the place of the other.
    - A single file takes the place of ``model.safetensors`` while the index, if there is one, does
      not name it. Then an index that names only this file takes the place of the other, and is
      removed last.
    - If the index names ``model.safetensors``, a single file is moved as several are.
    - Old files are removed when the new model is there. Until then its index lists them, so that
      the next save removes them if this one is killed.

    ``partial`` is the folder of the save, from ``folder_beside``, with the files.
    """
    index = folder / INDEX
    _remove_rest(folder)
    old = {MODEL, *filter(_is_of_model, _read_index(index)[0])} & {*os.listdir(folder)}
    is_new = not index.exists() and not any(folder.glob("*.safetensors"))
    # Without a number, they are in an index from the beginning, by which the next save knows them.
    names = _part_names(len(files), "" if is_new else _token(partial))
    # Files such as these are read together with those of the model if no index tells them apart.
    if not index.exists() and (len(files) > 1 or any(map(_PART.fullmatch, os.listdir(folder)))):
        _move_index(_index_of_present(folder) or _index_of(files, names), partial, index)
    if len(files) == 1 and MODEL not in _read_index(index)[0]:
        move(partial / MODEL, folder / MODEL)
        names = [MODEL]
    else:
        for file, name in zip(files, names, strict=True):
            os.replace(partial / file.name, folder / name)
        sync_folder(folder)
    if index.exists():
        _move_index(_index_of(files, names, old - {*names}), partial, index)
        _remove_rest(folder)
    if index.exists():
        _move_index(_index_of(files, names), partial, index)


def _move_index(text: bytes, partial: Path, index: Path) -> None:
    create(partial / index.name, text, len(text))
    move(partial / index.name, index)


def _index_of_present(folder: Path) -> bytes | None:
    """Return an index of the model in a folder without one; ``None`` if none can be read."""
    try:
        tensors = open_safetensors(folder)
    except (OSError, ValueError):
        return None
    files = {name: os.path.relpath(tensor.path, folder) for name, tensor in tensors.items()}
    return _index(files, tensors.nbytes)


def _remove_rest(folder: Path) -> None:
    """Remove files that the index replaces, those of killed saves, and the index if it is useless.

    A file is of a killed save if its name has the number of a save, the folder of this save is
    gone, and the index does not name it.
    """
    parts = {name: found[1] for name in os.listdir(folder) if (found := _PART.fullmatch(name))}
    # In this order: a save that runs keeps its folder until the index names its files.
    running = {_token(path) for path in folder.glob(f".{MODEL}.*.partial")}
    named, replaced = _read_index(folder / INDEX)
    killed = {name for name, token in parts.items() if token and token not in running}
    for name in (replaced | killed) - named:
        (folder / name).unlink(missing_ok=True)
    # Without the index, readers would take other parts that are there for those of the model.
    if named == {MODEL} and parts.keys() <= replaced | killed:
        (folder / INDEX).unlink()
    sync_folder(folder)


def _token(partial: Path) -> str:
    return partial.name.split(".")[-2]
