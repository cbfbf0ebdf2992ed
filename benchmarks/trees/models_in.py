"""Models loaded from safetensors files, against the packages that read them, and a bare read.

The bytes are in the page cache, so that copies and page faults count, and not the disk, except
where a line says so. Each of several processes reads its own part and times itself; the slowest
counts.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import gda
from benchmarks import fresh
from benchmarks.checkpoint.checkpoints import Scratch, peak_of
from benchmarks.pairs import Side
from benchmarks.trees.loading import SECONDS_PER_REQUEST
from benchmarks.work import AtMost, OfSpeed, Target, WithinMiB, Work
from gda.layout.spec import Shape
from gda.testing.pool import Pool

MIB = 2**20
MAX_BYTES = 32 * MIB
DEVICES = 8


class Model(NamedTuple):
    """Tensors of one shape and dtype, in some files, and the spec of all."""

    spec: PartitionSpec
    tensors: int = 4
    shape: Shape = (4096, 4096)
    dtype: str = "float32"
    files: int = 1

    def smaller(self) -> Model:
        return self._replace(tensors=min(self.tensors, 2 * self.files), shape=(16, 64))


ROWS, COLUMNS = PartitionSpec(("x", "y")), PartitionSpec(None, ("x", "y"))
BOTH, COPIES = PartitionSpec("x", "y"), PartitionSpec()


def _written(model: Model, folder: Path) -> None:
    folder.mkdir()
    rng, dtype = np.random.default_rng(0), jnp.dtype(model.dtype)
    for number in range(model.files):
        names = [f"w{n}" for n in range(number, model.tensors, model.files)]
        # No value is NaN, so that all compare.
        values = {name: rng.integers(0, 99, model.shape, np.uint8).astype(dtype) for name in names}
        save_file(values, folder / f"model-{number + 1:05}-of-{model.files:05}.safetensors")


@cache
def _sharding(spec: PartitionSpec) -> NamedSharding:
    devices = np.array(jax.devices())
    return NamedSharding(Mesh(devices.reshape(2, -1), ("x", "y")), spec)


def _ours(model: Model, folder: Path, max_bytes: int | None = None) -> Any:
    tensors = gda.storage.open_safetensors(folder)
    return gda.load_tree(tensors, _sharding(model.spec), plain=True, max_bytes=max_bytes)


def _packaged(model: Model, folder: Path) -> Any:
    arrays: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        arrays |= load_file(path)
    return jax.device_put(arrays, _sharding(model.spec))


def _mapped(model: Model, folder: Path) -> Any:
    """Load by a memory map, as a good user writes it without a package."""
    arrays: dict[str, Any] = {}
    sharding = _sharding(model.spec)
    for path in sorted(folder.iterdir()):
        whole = np.memmap(path, np.uint8, "r")
        begin = 8 + int(whole[:8].view(np.uint64)[0])
        for name, about in json.loads(whole[8:begin].tobytes()).items():
            if name != "__metadata__":
                first, last = about["data_offsets"]
                dtype = {"F32": np.float32, "BF16": jnp.bfloat16}[about["dtype"]]
                values = whole[begin + first : begin + last].view(dtype).reshape(about["shape"])
                arrays[name] = jax.make_array_from_callback(
                    values.shape, sharding, values.__getitem__
                )
    return arrays


def _flax(model: Model, folder: Path) -> Any:
    from safetensors import flax

    arrays: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        arrays |= flax.load_file(path)
    return jax.device_put(arrays, _sharding(model.spec))


def _orbax(model: Model, folder: Path) -> Any:
    from orbax.checkpoint.experimental import v1 as ocp

    context = ocp.Context()
    context.checkpoint_layout = ocp.options.CheckpointLayout.SAFETENSORS
    with context:
        sharding, dtype = _sharding(model.spec), jnp.dtype(model.dtype)
        leaf = jax.ShapeDtypeStruct(model.shape, dtype, sharding=sharding)
        return ocp.load(str(folder), {f"w{n}": leaf for n in range(model.tensors)})


def _bare(model: Model, folder: Path) -> Any:
    """Read the bytes of a process once, into memory that JAX adopts."""
    del model
    arrays = []
    for path in sorted(folder.iterdir()):
        with open(path, "rb", buffering=0) as file:
            nbytes = os.path.getsize(path) // jax.process_count()
            memory = gda.aligned_empty(nbytes, np.uint8)
            view = memoryview(memory.data)
            while view and (count := file.readinto(view)):
                view = view[count:]
            arrays.append(jax.device_put(memory, jax.local_devices()[0]))
    return arrays


def _torch(model: Model, folder: Path) -> Any:
    """Load with PyTorch, whose tensors share their memory with NumPy's arrays."""
    torch: Any = import_module("safetensors.torch")
    arrays: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        tensors = torch.load_file(path)
        arrays |= {name: tensor.numpy() for name, tensor in tensors.items()}
    return jax.device_put(arrays, _sharding(model.spec))


def _fastsafetensors(model: Model, folder: Path) -> Any:
    """Load without a GPU: its threads read the files, past the kernel's path to a GPU."""
    fast: Any = import_module("fastsafetensors")
    paths = [str(path) for path in sorted(folder.iterdir())]
    with fast.fastsafe_open(paths, device="cpu", nogds=True) as file:
        names = [*file.keys()]
        arrays = {name: file.get_tensor(name).numpy() for name in names}
        return jax.block_until_ready(jax.device_put(arrays, _sharding(model.spec)))


WAYS: dict[str, Callable[[Model, Path], Any]] = {
    "gda.load_tree": _ours,
    "safetensors.numpy.load_file and device_put": _packaged,
    "numpy.memmap and make_array_from_callback": _mapped,
    "safetensors.flax.load_file and device_put": _flax,
    "Orbax v1, its layout of safetensors": _orbax,
    "bare read into memory that JAX adopts": _bare,
    "safetensors.torch.load_file and device_put": _torch,
    "fastsafetensors and device_put": _fastsafetensors,
}
_GDA, _PACKAGED, _MAPPED, _FLAX, _ORBAX, _BARE, _TORCH, _FAST = WAYS
# Without them, the lines have no such way.
_INSTALLED = [
    way for way, package in [(_TORCH, "torch"), (_FAST, "fastsafetensors")] if find_spec(package)
]


def touch_memory() -> None:
    """Let the system hold as many pages as any way needs."""
    np.ones(512 * MIB, np.uint8)


def _loading(model: Model, ways: Sequence[str], quick: bool) -> list[Side]:
    model, scratch = model.smaller() if quick else model, Scratch()
    folder = scratch.another()
    _written(model, folder)
    expected = _packaged(model, folder)
    for name, array in _ours(model, folder).items():
        assert array.sharding == expected[name].sharding
        assert np.array_equal(array, expected[name])

    def run(way: str) -> Any:
        return jax.block_until_ready(WAYS[way](model, folder))

    def fresh() -> tuple[()]:
        touch_memory()
        return scratch.keep()

    return [Side(partial(run, way), fresh) for way in ways]


# In other processes.


@cache
def _pool(processes: int) -> Pool:
    return Pool(processes, devices=DEVICES // processes)


def seconds(way: str, model: Model, folder: str) -> float:
    """Return how long this process takes."""
    gda.check_processes_agree({}, name="ready")
    start = time.perf_counter()
    jax.block_until_ready(WAYS[way](model, Path(folder)))
    return time.perf_counter() - start


def _in_processes(processes: int, model: Model, ways: Sequence[str], quick: bool) -> list[Side]:
    model, scratch = model.smaller() if quick else model, Scratch()
    folder = scratch.another()
    _written(model, folder)

    def run(way: str) -> float:
        return max(_pool(processes).run(seconds, way, model, str(folder)))

    return [Side(partial(run, way), scratch.keep, times_itself=True) for way in ways]


# In new processes.


def loading(way: str, model: Model, folder: Path, small: Path) -> Callable[[], Any]:
    """Prepare the first load of a model, in a process that has loaded a small one.

    So no way pays for its imports.
    """
    jax.block_until_ready(WAYS[way](model.smaller(), small))
    touch_memory()
    return partial(WAYS[way], model, folder)


def _fresh(
    model: Model,
    ways: Sequence[str],
    quick: bool,
    is_cold: bool = False,
    clock: fresh.Clock = "perf_counter",
) -> list[Side]:
    model, scratch = model.smaller() if quick else model, Scratch()
    folder, small = scratch.another(), scratch.another()
    _written(model, folder)
    _written(model.smaller(), small)
    cold = folder if is_cold else None
    return [
        fresh.side(
            partial(loading, way, model, folder, small), scratch.keep, cold=cold, clock=clock
        )
        for way in ways
    ]


class _Slow:
    """A tensor of a store that takes its time for each request."""

    def __init__(self, tensor: Any) -> None:
        self._tensor, self.shape, self.dtype = tensor, tensor.shape, tensor.dtype

    def __getitem__(self, index: Any) -> Any:
        time.sleep(SECONDS_PER_REQUEST)
        return self._tensor[index]


def _from_slow_store(model: Model, quick: bool) -> list[Side]:
    model, scratch = model.smaller() if quick else model, Scratch()
    folder = scratch.another()
    _written(model, folder)
    sources = {n: _Slow(t) for n, t in gda.storage.open_safetensors(folder).items()}

    def ours() -> Any:
        return gda.load_tree(sources, _sharding(model.spec), plain=True, max_workers=32)

    def rival() -> Any:
        arrays = {name: source[...] for name, source in sources.items()}
        return jax.device_put(arrays, _sharding(model.spec))

    return [
        Side(lambda way=way: jax.block_until_ready(way()), scratch.keep) for way in (ours, rival)
    ]


def mebibytes_beyond(way: str, model: Model, folder: str) -> float:
    """Return what this process holds at most while it loads, beyond the arrays."""
    held = model.tensors * int(np.prod(model.shape)) * 4
    options = {"max_bytes": MAX_BYTES} if way == _GDA else {}
    load = partial(WAYS[way], model, Path(folder), **options)
    load()  # what is imported and started once does not count
    return max(peak_of(load) - held, 1) / MIB


def _remembering(model: Model, quick: bool) -> list[Side]:
    """Measure in a process of its own: memory that other works freed would not be seen."""
    model, scratch = model.smaller() if quick else model, Scratch()
    folder = scratch.another()
    _written(model, folder)

    def run(way: str) -> float:
        return _pool(1).run(mebibytes_beyond, way, model, str(folder))[0]

    ways = (_GDA, _PACKAGED)
    return [Side(partial(run, way), scratch.keep, times_itself=True) for way in ways]


def works(quick: bool) -> list[Work]:
    """Return the works; small ones if ``quick``."""
    half = Model(COLUMNS, dtype="bfloat16", shape=(4096, 8192))
    small = Model(ROWS, 4000, (64, 256))
    many = Model(ROWS, 30, (1024, 2048), files=30)
    targets: Mapping[str, Target | None] = {
        _PACKAGED: AtMost(0.4),
        _MAPPED: AtMost(0.8),
        _BARE: OfSpeed(0.8),
    }
    others = {_FLAX: None, _ORBAX: None, **dict.fromkeys(_INSTALLED)}
    here = [
        Work(
            f"load a model from safetensors, {name}",
            partial(_loading, model, (_GDA, *rivals), quick),
            rivals,
            ours=_GDA,
            raw=_BARE if _BARE in rivals else "",
            seconds=3,
        )
        for name, model, rivals in [
            ("256 MiB of float32: rows", Model(ROWS), targets | others),
            ("256 MiB of float32: columns", Model(COLUMNS), targets),
            ("256 MiB of float32: rows and columns", Model(BOTH), targets),
            ("128 MiB of float32: replicated", Model(COPIES, tensors=2), {_PACKAGED: AtMost(0.4)}),
            ("256 MiB of bfloat16: columns", half, targets),
            ("240 MiB in 30 files: rows", many, targets),
            ("4,000 tensors of 64 KiB: rows", small, {_PACKAGED: None}),
        ]
    ]
    alone: Mapping[str, Target | None] = {_PACKAGED: AtMost(0.4)}
    apart = [
        Work(
            f"load 256 MiB of columns from safetensors in {processes} processes",
            partial(_in_processes, processes, Model(COLUMNS), (_GDA, *alone), quick),
            alone,
            ours=_GDA,
            seconds=3,
        )
        for processes in (2, 4)
    ]

    def anew(name: str, model: Model, rivals: Mapping[str, Target | None], **options: Any) -> Work:
        return Work(
            f"{name} in a fresh process",
            partial(_fresh, model, (_GDA, *rivals), quick, **options),
            rivals,
            ours=_GDA,
            raw=_BARE if _BARE in rivals else "",
            seconds=2 * (1 + len(rivals)),
        )

    layouts = [
        ("256 MiB of rows", Model(ROWS)),
        ("256 MiB of rows and columns", Model(BOTH)),
        ("256 MiB of columns", Model(COLUMNS)),
    ]
    instead = dict.fromkeys(_INSTALLED)
    mapped: Mapping[str, Target | None] = {_MAPPED: AtMost(0.8)}
    plain: Mapping[str, Target | None] = {**mapped, _BARE: OfSpeed(0.8)}
    in_new_processes = [
        *[
            anew(
                f"load {name} from safetensors",
                model,
                targets | (instead if model.spec == ROWS else {}),
            )
            for name, model in layouts
        ],
        *[
            anew(f"load {name} from safetensors on a disk", model, plain, is_cold=True)
            for name, model in layouts
        ],
        *[
            anew(f"CPU time to load {name} from safetensors", model, mapped, clock="process_time")
            for name, model in layouts
        ],
        anew("load 256 MiB of columns of bfloat16 from safetensors", half, targets),
        # In one process, what gda frees makes malloc keep the memory of the rival.
        anew("load 240 MiB of rows in 30 files from safetensors", many, targets),
    ]
    slow = Work(
        "load 64 tensors of safetensors from a store with 20 ms per request",
        partial(_from_slow_store, Model(ROWS, 64, (64, 256)), quick),
        {"tensor by tensor, and device_put": AtMost(0.1)},
        ours="gda.load_tree with max_workers=32",
        seconds=4,
    )
    memory = Work(
        "memory beyond the arrays, load 256 MiB of columns from safetensors, max_bytes=32 MiB",
        partial(_remembering, Model(COLUMNS), quick),
        {_PACKAGED: None},
        limit=WithinMiB(MAX_BYTES / MIB),
        ours=_GDA,
        unit="MiB",
        seconds=0,
    )
    return [*in_new_processes, *here, *apart, slow, memory]
