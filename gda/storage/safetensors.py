"""The tensors of safetensors files by name, as sources: ``gda.storage.open_safetensors``."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from gda.layout.boundary import public, set_module
from gda.layout.cover import READ_BYTES
from gda.layout.indices import sizes_of
from gda.layout.spec import Index, Shape
from gda.layout.text import counted, join_some, near_name
from gda.storage.new_files import axis_of_runs
from gda.storage.safetensors_format import read_header, read_object, version_of
from gda.storage.sources import SAFETENSORS_DTYPES, LocalFile
from gda.storage.system_calls import read_into
from gda.storage.views.lazy import lazy

# Reads of columns: runs with gaps of READ_BYTES or more are read one by one, others together with
# their gaps, a piece at a time: 2 KiB of every 16 KiB took 3 times as long run by run.
PIECE_BYTES = 2**20

_PathLike = str | os.PathLike[str]
_Memory = np.ndarray[Any, Any]


@set_module("gda.storage")
@public
def open_safetensors(path_or_paths: _PathLike | Iterable[_PathLike]) -> SafetensorsFiles:
    """Return the tensors of safetensors files by name, as sources that are read when sliced.

    Only the headers are read. A tensor opens its file for each read and closes it, so that any
    number of threads may read.

    A header or an index may have 32,000,000 bytes, for some 180,000 tensors. More is refused before
    it is parsed. A name twice in an object is refused too.

    Args:
      path_or_paths: a ``.safetensors`` file or several; an index such as
        ``model.safetensors.index.json``, with its files in the same folder; or a folder with one
        model: an index, a single file, or numbered parts such as
        ``model-00001-of-00003.safetensors``. An index gives the tensors that it names.

    Raises:
      FileNotFoundError: a file is missing, a numbered part too, or a folder has none.
      ValueError: a file is broken, truncated or too large; a tensor is in two files; a folder has
        several models; or an index names a file outside its folder, or with too long a name. The
        message names file and tensor. A read raises it if the file has changed since it was opened.

    >>> import gda, numpy as np, os, tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, 'model.safetensors')
    ...     save_file({'w': np.arange(6, dtype=np.float32).reshape(3, 2)}, path)
    ...     tensors = gda.storage.open_safetensors(path)
    ...     print(list(tensors), tensors.nbytes)
    ...     print(tensors['w'].shape, tensors['w'].dtype, tensors['w'][1:3, 0:1].tolist())
    ['w'] 24
    (3, 2) float32 [[2.0], [4.0]]
    """
    # Absolute: the program may change its directory before it reads a tensor.
    if not isinstance(path_or_paths, str | os.PathLike):
        return _of_files([Path(path).absolute() for path in path_or_paths])
    paths = [Path(path_or_paths).absolute()]
    if paths[0].is_dir():
        paths = _files_of_folder(paths[0])
    return _of_index(paths[0]) if paths[0].suffix == ".json" else _of_files(paths)


@set_module("gda.storage")
class SafetensorsFiles(Mapping[str, "SafetensorsTensor"]):
    """The tensors of safetensors files by name, from ``open_safetensors``.

    Attributes:
      metadata: the texts in the headers, such as ``{'format': 'pt'}``. If several files have texts
        of one name that differ, that of the first file.

    >>> import gda, numpy as np, os, tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, 'model.safetensors')
    ...     save_file({'w': np.ones((8, 2), np.float32)}, path)
    ...     tensors = gda.storage.open_safetensors(path)
    ...     list(tensors), tensors.nbytes, tensors['w'][:1]
    (['w'], 64, array([[1., 1.]], dtype=float32))
    """

    def __init__(self, tensors: dict[str, SafetensorsTensor], metadata: dict[str, str]) -> None:
        self._tensors = tensors
        self.metadata = metadata

    def __getitem__(self, name: str) -> SafetensorsTensor:
        """Return a tensor."""
        if name not in self._tensors:
            raise KeyError(f"the files have no tensor {name!r}{near_name(name, self._tensors)}")
        return self._tensors[name]

    # Without these two, each question after a missing name looks for a near one.
    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def get(self, name: str, default: Any = None) -> Any:
        """Return a tensor, or ``default`` if there is none of this name."""
        return self._tensors.get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.values())

    def __repr__(self) -> str:
        return f"SafetensorsFiles({counted(len(self), 'tensor')}, {self.nbytes} bytes)"


# The safetensors package is not used: it has no 8-bit floats for NumPy, copies data once more and
# keeps files mapped, so that a file truncated later ends the process instead of raising. The format
# is open and small: a length, JSON, data.
@set_module("gda.storage")
class SafetensorsTensor(LocalFile):
    """A tensor in a file, read when it is sliced; a source of ``load_tree`` and ``from_source``.

    ``np.asarray(tensor)`` reads all of it.

    Attributes:
      path: the file.
      name: the name of the tensor in the file.
      shape: its sizes.
      nbytes: bytes of the whole tensor.

    >>> import gda, numpy as np, os, tempfile
    >>> from safetensors.numpy import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, 'model.safetensors')
    ...     save_file({'w': np.arange(4)}, path)
    ...     tensor = gda.storage.open_safetensors(path)['w']
    ...     tensor.shape, tensor.dtype, tensor[2:]
    ((4,), dtype('int64'), array([2, 3]))
    """

    def __init__(
        self,
        path: Path,
        name: str,
        shape: Shape,
        dtype: str,
        offset: int,
        nbytes: int,
        version: tuple[int, ...],
    ) -> None:
        self.path, self.name, self.shape, self.nbytes = path, name, shape, nbytes
        self._dtype = dtype
        self._offset = offset
        self._version = version

    @property
    def dtype(self) -> np.dtype[Any]:
        """The NumPy dtype; dtypes of JAX such as bfloat16 are among them.

        Raises:
          TypeError: its elements have less than 8 bits; the file packs several into a byte.
        """
        if self._dtype not in SAFETENSORS_DTYPES:
            raise TypeError(
                f"tensor {self.name!r} of {self.path} has dtype {self._dtype}, with several "
                "elements in a byte, which gda does not read; convert it to a larger dtype, such "
                "as F8_E4M3"
            )
        return SAFETENSORS_DTYPES[self._dtype]

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def __getitem__(self, index: Any) -> _Memory:
        """Read a part: integers, slices with any step, ``...`` and ``None``, as in NumPy."""
        items = () if index is ... else index if isinstance(index, tuple) else (index,)
        are_plain = all(isinstance(item, slice) and item.step is None for item in items)
        if not are_plain or len(items) > self.ndim:
            return np.asarray(lazy(self)[index])
        # Without a view, whose plan costs more than a small read.
        given = (*items, *[slice(None)] * (self.ndim - len(items)))
        ends = [item.indices(size)[:2] for item, size in zip(given, self.shape, strict=True)]
        box = tuple([slice(start, max(start, stop)) for start, stop in ends])
        out = np.empty(sizes_of(box), self.dtype)
        self.read_direct(out, box)
        return out

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> _Memory:
        """Read the whole tensor, for ``np.asarray``, ``np.stack``, ``jnp.asarray`` and the like.

        Raises:
          ValueError: ``copy=False`` was given, but a read always makes a new array.
        """
        return lazy(self).__array__(dtype, copy)

    def read_direct(self, out: _Memory, index: Index) -> None:
        """Read the elements at ``index``, slices with start and stop, into C-contiguous ``out``.

        Raises:
          ValueError: the file has changed since it was opened, or ``out`` has another shape or
            dtype.
        """
        shape = sizes_of(index)
        if out.shape != shape or out.dtype != self.dtype or not out.flags.c_contiguous:
            raise ValueError(
                f"{self._text()} {index} needs a C-contiguous array of shape {shape} and dtype "
                f"{self.dtype}, not {out.shape} and {out.dtype}"
            )
        if not out.size:
            return
        with self._opened() as file:
            self._read_part(file, out, index)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        with open(self.path, "rb", buffering=0) as file:
            self._check_unchanged(file.fileno())
            yield file.fileno()
            self._check_unchanged(file.fileno())  # the file may be written meanwhile

    def _check_unchanged(self, file: int) -> None:
        if version_of(file) != self._version:
            raise ValueError(
                f"{self._text()}: the file has changed since it was opened, so the tensor may be "
                "elsewhere in it; open it again"
            )

    def _read_part(self, file: int, out: _Memory, index: Index) -> None:
        axis, itemsize = axis_of_runs(self.shape, out.shape), self.dtype.itemsize
        strides = [math.prod(self.shape[k + 1 :]) * itemsize for k in range(self.ndim)]
        first = sum(s.start * stride for s, stride in zip(index, strides, strict=True))
        # The dimension before that of the runs gives their number; those before it, their places.
        count, stride = (out.shape[axis - 1], strides[axis - 1]) if axis else (1, out.nbytes)
        run_bytes = math.prod(out.shape[axis:]) * itemsize
        lines = out.reshape(-1).view(np.uint8).reshape(-1, count, run_bytes)
        places = np.ndindex(out.shape[: max(axis - 1, 0)])
        for line, place in zip(lines, places, strict=True):
            start = first + sum(n * each for n, each in zip(place, strides, strict=False))
            self._read_runs(file, line, start, stride)

    def _read_runs(self, file: int, runs: _Memory, start: int, stride: int) -> None:
        count, run_bytes = runs.shape
        if count == 1 or stride - run_bytes >= READ_BYTES or stride > PIECE_BYTES:
            for number in range(count):
                self._read(file, runs[number], start + number * stride)
            return
        at_once = min(count, PIECE_BYTES // stride)
        piece = np.empty(at_once * stride, np.uint8)
        for number in range(0, count, at_once):
            some = min(at_once, count - number)
            read = piece[: (some - 1) * stride + run_bytes]
            self._read(file, read, start + number * stride)
            np.copyto(
                runs[number : number + some],
                np.lib.stride_tricks.as_strided(read, (some, run_bytes), (stride, 1)),
            )

    def _read(self, file: int, out: _Memory, start: int) -> None:
        if read_into(file, out, self._offset + start) < out.nbytes:
            raise ValueError(
                f"{self._text()}: the file was truncated while it was read; copy it again"
            )

    def _text(self) -> str:
        return f"tensor {self.name!r} of {self.path}"

    def __repr__(self) -> str:
        return (
            f"SafetensorsTensor({self.name!r}, shape={self.shape}, dtype={self._dtype}, "
            f"path={str(self.path)!r})"
        )


# Several tensors at a time.

_MOST_AT_A_TIME = 1024  # buffers in one request, which the kernel limits
_Rows = tuple[SafetensorsTensor, Index, _Memory]


def place_of(tensor: SafetensorsTensor) -> tuple[str, tuple[int, ...], int]:
    """Return the file of a tensor, its version, and the first byte in it."""
    return str(tensor.path), tensor._version, tensor._offset


def read_together(every: Sequence[_Rows]) -> None:
    """Read whole rows of tensors into memory; those side by side in a file with one request.

    Errors name one of the tensors, not always the one that cannot be read.
    """
    for _, group in itertools.groupby(every, key=lambda rows: place_of(rows[0])[:2]):
        of_file = list(group)
        with of_file[0][0]._opened() as file:
            for some in _side_by_side(of_file):
                _read_rows(file, some)


def _side_by_side(of_file: Iterable[_Rows]) -> Iterator[list[_Rows]]:
    some: list[_Rows] = []
    end = -1
    for tensor, index, out in of_file:
        start = _start_of(tensor, index)
        if some and (start != end or len(some) == _MOST_AT_A_TIME):
            yield some
            some = []
        some.append((tensor, index, out))
        end = start + out.nbytes
    yield some


def _start_of(tensor: SafetensorsTensor, rows: Index) -> int:
    """Return the first byte of rows in the file."""
    first = rows[0].start if rows else 0
    return tensor._offset + (first * (tensor.nbytes // tensor.shape[0]) if first else 0)


def _read_rows(file: int, some: Sequence[_Rows]) -> None:
    memory: list[Any] = [out.reshape(-1).view(np.uint8) for _, _, out in some]
    count = os.preadv(file, memory, _start_of(*some[0][:2]))
    if count < sum(out.nbytes for out in memory):
        for tensor, index, out in some:
            tensor._read_part(file, out, index)


# The files, and their tensors.


_PART = re.compile(r"(.*?)(\d+)-of-(\d+)(.*)")


def _files_of_folder(folder: Path) -> list[Path]:
    indices = sorted(folder.glob("*.safetensors.index.json"))
    if len(indices) > 1:
        names = ", ".join(path.name for path in indices)
        raise ValueError(f"{folder} has more than one index: {names}; pass the path of one")
    if indices:
        return indices
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} has no .safetensors file and no index of such files")
    models: dict[str, list[re.Match[str]]] = {}
    for path in files:
        part = _PART.fullmatch(path.name)
        name = path.name if part is None else f"{part[1]}*-of-{part[3]}{part[4]}"
        models.setdefault(name, []).extend([] if part is None else [part])
    if len(models) > 1:
        raise ValueError(
            f"{folder} has {len(models)} models and no index: {join_some(list(models))}; pass the "
            "path of a file, or the paths of all files to open"
        )
    ((name, parts),) = models.items()
    if parts and (missing := _missing(parts)) is not None:
        raise FileNotFoundError(
            f"{folder} has {len(parts)} of the {int(parts[0][3])} files {name}: {missing} is "
            "missing; copy it again, or pass the paths of the files to open"
        )
    return files


def _missing(parts: list[re.Match[str]]) -> str | None:
    """Return the name of the first numbered part that is missing; they count from 0 or 1."""
    numbers = {int(part[2]) for part in parts}
    first, (stem, width, count, end) = int(0 not in numbers), parts[0].groups()
    for number in range(first, first + int(count)):
        if number not in numbers:
            return f"{stem}{number:0{len(width)}}-of-{count}{end}"
    return None


def _of_files(paths: list[Path]) -> SafetensorsFiles:
    if not paths:
        raise ValueError("no paths were given; expected at least one .safetensors file")
    files = [_of_file(path) for path in paths]
    tensors: dict[str, SafetensorsTensor] = {}
    for path, file in zip(paths, files, strict=True):
        for name, tensor in file.items():
            if name in tensors:
                both = f"{tensors[name].path} and in {path}"
                raise ValueError(f"tensor {name!r} is in {both}; open only one of these files")
            tensors[name] = tensor
    return SafetensorsFiles(tensors, _merged(files))


def _of_index(path: Path) -> SafetensorsFiles:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    content = read_object(path)
    files = content.get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{path} has no weight_map, which maps tensor names to files")
    for name, file in files.items():
        if not _is_inside(file):
            raise ValueError(
                f"{path}: the file of tensor {name!r} is {file!r}; expected is a file in the "
                "folder of the index"
            )
    of_file = {file: _of_file(path.parent / file) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in of_file[file]:
            raise ValueError(
                f"{path}: tensor {name!r} is not in {file}. If it is tied to another, which is "
                "saved once, remove its line from the index; otherwise download the model again"
            )
    tensors = {name: of_file[file][name] for name, file in files.items()}
    return SafetensorsFiles(tensors, _merged(of_file.values()))


def _is_inside(file: Any) -> bool:
    # Checked by name: in the caches of published models these files are links to other folders.
    if not isinstance(file, str) or not file or "\0" in file or "\\" in file:
        return False
    path = PurePosixPath(file)
    return not path.is_absolute() and ".." not in path.parts and bool(path.parts)


def _of_file(path: Path) -> SafetensorsFiles:
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(
            f"{path} is a link to {os.readlink(path)}, which is not here; fetch it again, from "
            "git-annex by git annex get"
        )
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    header = read_header(path)
    tensors = {
        name: SafetensorsTensor(
            path, name, shape, dtype, header.data_start + start, stop - start, header.version
        )
        for name, dtype, shape, start, stop in header.entries
    }
    return SafetensorsFiles(tensors, header.metadata)


def _merged(files: Iterable[SafetensorsFiles]) -> dict[str, str]:
    metadata: dict[str, str] = {}
    for file in files:
        metadata = file.metadata | metadata
    return metadata
