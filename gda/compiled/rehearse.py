"""A call that is compiled for devices and not run: ``gda.rehearse`` and ``gda.assert_fits``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered, Traced

from gda.compiled.collective_times import Interconnect, links_of
from gda.compiled.collectives import modules_in, slices_of
from gda.compiled.devices.device_kinds import kind_of_device
from gda.compiled.hlo import Collectives, Schedule, format_size, read_schedule
from gda.compiled.hlo.allocations import read_temporaries
from gda.compiled.hlo.live_ranges import LiveRanges
from gda.compiled.hlo.products import KernelCosts
from gda.compiled.programs import Program, compiled, meshes_of, stage_of, unwrapped
from gda.compiled.rehearsal import Rehearsal
from gda.compiled.rehearsal_facts import ArgumentBytes, repetitions_of, traffic_of
from gda.compiled.report.rehearsal_text import repetition_of
from gda.compiled.seconds import seconds_of
from gda.compiled.topologies.gpus import gpu_capacity_of
from gda.compiled.topologies.without_hardware import without_hardware
from gda.compiled.traces.flops import costs_of, flops_of
from gda.compiled.traces.scanned_caches import scanned_caches
from gda.compiled.traces.whole_shapes import with_whole_shapes
from gda.layout.boundary import public, set_module
from gda.layout.dtype_names import packed_nbytes
from gda.layout.spec import Shape, SpecEntry, axes_by_dimension, check_spec, entries_of
from gda.layout.text import format_bytes, listed
from gda.mesh import is_on_host
from gda.multihost.descriptions import leaf_path

# "… the total memory required for HLO temporaries (19.75G) exceeds available HBM (15.75G) …", and
# of JAX 0.8: "… Used 24.00G of 15.75G hbm …"
_NEEDED = re.compile(
    r"([\d.]+)([KMGT]?)(?:\) exceeds available HBM \(| of )([\d.]+)([KMGT]?)\)?", re.IGNORECASE
)
_SHORT = 2**18  # characters of a program that is cheap to compile again, for the price of an advice
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@set_module("gda")
@public
def rehearse(
    fun: Program,
    /,
    *args: Any,
    examples: float | None = None,
    price: float | None = None,
    costs: Mapping[str, float] | None = None,
    **kwargs: Any,
) -> Rehearsal:
    """Compile a call ``fun(*args, **kwargs)``; return its memory, communication and time.

    Nothing is run or allocated. The arguments say for which devices: ``gda.abstract`` places shapes
    on a mesh, and ``gda.rehearsal_mesh`` has devices that are not here. On devices that are here,
    CPUs and GPUs, the answer is what their compiler knows.

    A program that does not fit is an answer too, with ``fits=False``.

    Args:
      fun: as for ``gda.collectives``: any callable, or a stage of JAX without arguments.
      args, kwargs: as for a call: ``jax.ShapeDtypeStruct`` with a ``sharding``, arrays,
        ``GlobalArray``s, trees of them, static arguments.
      examples: the number of examples, or tokens, of one call on all devices together, for the
        number of them in a second. Pass a function with its own keyword argument ``examples`` as
        ``functools.partial(fun, examples=…)``.
      price: of one device for one hour, in any currency, for the cost of a call.
      costs: floating-point operations of one execution of a kernel on one device, by the target of
        its custom call or the name of the Pallas kernel. The ``cost_estimate`` of a Pallas kernel
        and the shapes of attention by cuDNN need none.

    Raises:
      TypeError: ``fun`` is not callable, or a stage comes with arguments.
      ValueError: ``examples`` or ``price`` is no number above 0, or ``costs`` has a name that the
        program does not have.
      Exception: any error of tracing or compiling. A program that does not fit raises only if it
        comes as a stage, because a stage does not tell its devices before it is compiled.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('data',))
    >>> w = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=NamedSharding(mesh, P()))
    >>> x = jax.ShapeDtypeStruct((16, 64), np.float32, sharding=NamedSharding(mesh, P('data')))
    >>> step = jax.jit(jax.grad(lambda w, x: ((x @ w) ** 2).sum()))
    >>> rehearsal = gda.rehearse(step, w, x)
    >>> rehearsal.argument_bytes, rehearsal.undonated_bytes
    (8704, 8192)
    >>> rehearsal.traffic
    (AxisTraffic(axes=('data',), executions=1, nbytes=8192, nbytes_slow=None, least_seconds=None),)
    """
    return rehearsal_of(fun, args, kwargs, examples=examples, price=price, costs=costs)


def rehearsal_of(
    fun: Program,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    examples: float | None,
    price: float | None,
    costs: Mapping[str, float] | None = None,
    is_last: bool = False,
) -> Rehearsal:
    """Rehearse a call, and advice on it unless ``is_last``; it may have keywords of any name."""
    given_costs = {} if costs is None else dict(costs)
    figures = [(f"costs[{name!r:.80}]", each) for name, each in given_costs.items()]
    for name, given in (("examples", examples), ("price", price), *figures):
        if given is not None and not 0 < given < math.inf:
            raise ValueError(f"{name} must be a number above 0, not {given!r:.80}")
    fun, args, kwargs = unwrapped(fun, args, kwargs)
    begun = time.perf_counter()
    with without_hardware():
        jax.devices()  # tracing would initialise JAX's backends, of which libtpu may be one
    name = getattr(fun, "__name__", type(fun).__name__)
    stage = stage_of(fun, args, kwargs)
    # Lowered here, so that its arguments are known if it does not compile.
    lowered = stage.lower() if isinstance(stage, Traced) else stage
    given = jax.tree.leaves((args, kwargs))
    mesh = _mesh_of(given)
    build = _compiled(lowered, mesh)
    program = build.program
    seconds = time.perf_counter() - begun

    shardings = () if program is None else (program.input_shardings, program.output_shardings)
    mesh = mesh or _mesh_of(shardings)
    placed = (device for each in jax.tree.leaves(shardings) for device in each.device_set)
    device = mesh.devices.flat[0] if mesh is not None else next(placed, jax.devices()[0])
    num_devices, mesh_shape = (1, {}) if mesh is None else (mesh.size, dict(mesh.shape))
    copied = scanned_caches(stage.jaxpr) if isinstance(stage, Traced) else {}
    arguments = [*_arguments(stage, program, iter(given), mesh, copied)]
    arguments = _with_donations(arguments, lowered, program)
    memory = (
        _memory_that_does_not_fit(build, arguments, device)
        if program is None
        else _memory_of(program, build, device)
    )
    flops_total = flops_model = None
    kernels = KernelCosts(given_costs)
    if isinstance(stage, Traced):
        flops_total = flops_of(stage.jaxpr, costs=given_costs)
        flops_model = flops_of(stage.jaxpr, costs=given_costs, again=False)
        kernels = costs_of(stage.jaxpr, given_costs)
    modules = modules_in(build.text, mesh) if build.text else []  # unless it is not written
    if build.text and (missing := [each for each in given_costs if each not in build.text]):
        targets = listed(sorted({*re.findall(r'custom_call_target="([^"]*)"', build.text)}))
        raise ValueError(
            f"costs has {missing[0]!r:.80}, which is no kernel of {name}; give the target of a "
            f"custom call, of which it has {targets or 'none'}, or the name of a Pallas kernel"
        )
    schedule = read_schedule(modules, kernels) if modules else None
    collectives = _collectives_of(build, schedule, mesh)
    temporaries = tuple(read_temporaries(build.assignment, modules) if modules else ())
    if isinstance(stage, Traced) and num_devices > 1:
        temporaries = with_whole_shapes(temporaries, stage.jaxpr, mesh_shape)
    # XLA may have found that no copy is needed. A TPU's compiler has one array for both, or copies
    # a carry too, for another layout. Of an argument that is not donated the result is the copy.
    held = {(each.dtype, each.nbytes) for each in temporaries if device.platform != "tpu"}
    arguments = [
        each
        if each.could_be_donated or (each.dtype, each.nbytes) in held
        else each._replace(copied_at=None)
        for each in arguments
    ]
    has_slow, hosts, links = _links(mesh)
    rehearsal = Rehearsal(
        name=name,
        device_kind=device.device_kind,
        num_devices=num_devices,
        mesh_shape=mesh_shape,
        **memory,
        undonated_bytes=sum(each.nbytes for each in arguments if each.could_be_donated),
        flops=None if schedule is None else schedule.flops,
        flops_total=flops_total,
        flops_model=flops_model,
        compile_seconds=seconds,
        collectives=collectives,
        traffic=() if collectives is None else traffic_of(collectives, has_slow, hosts, links),
        arguments=tuple(sorted(arguments, key=lambda each: -each.nbytes)),
        temporaries=temporaries,
        message=build.failure.strip(),
        examples=examples,
        price=price,
        num_hosts=1 if mesh is None else len({each.process_index for each in mesh.devices.flat}),
    )
    kind = kind_of_device(device.device_kind)
    of_model = repetitions_of(rehearsal.flops, num_devices, flops_model)
    ranges = LiveRanges(build.assignment, modules)
    times = rehearsal.repetitions or 1
    seconds_of_step = seconds_of(schedule, kind, links, times, of_model, ranges)
    rehearsal = dataclasses.replace(rehearsal, seconds=seconds_of_step)
    is_short = 0 < len(build.text) < _SHORT
    if is_short and not is_last and seconds_of_step.estimate and mesh is not None:
        advised = _with_sharded_batch(rehearsal, (args, kwargs), lowered, mesh)
        if advised is not None:
            options = {"examples": examples, "price": price, "costs": costs, "is_last": True}
            with contextlib.suppress(Exception):  # such as of a shard_map with other specs
                after = rehearsal_of(fun, *advised, **options)
                known = None if after.seconds.is_bound or not after.fits else after.seconds.estimate
                rehearsal = dataclasses.replace(rehearsal, seconds_advised=known)
    return rehearsal


def _with_sharded_batch(
    rehearsal: Rehearsal, call: Any, lowered: Lowered | Compiled, mesh: Mesh
) -> Any:
    """Return the arguments with the batch sharded over the axes that shard none; None without one.

    The batch are the arguments that no result can replace, if all have one first dimension.
    """
    axes = rehearsal.unused_axes
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if not repetition_of(rehearsal) or not axes or isinstance(lowered, Compiled):
        return None
    results = {(each.shape, each.dtype) for each in jax.tree.leaves(lowered.out_info)}
    leaves, structure = jax.tree.flatten(call)
    batch = {
        at: each
        for at, each in enumerate(leaves)
        if len(getattr(each, "shape", ())) and (each.shape, each.dtype) not in results
    }
    if len({each.shape[0] for each in batch.values()}) != 1:
        return None
    for at, each in batch.items():
        spec = _spec_of(getattr(each, "sharding", None), each.shape, mesh)
        first, *rest = axes_by_dimension(spec or (), len(each.shape), mesh.shape)
        if spec is None or each.shape[0] % (parts * math.prod(mesh.shape[n] for n in first)):
            return None
        sharding = NamedSharding(mesh, PartitionSpec(*entries_of(((*first, *axes), *rest))))
        leaves[at] = jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=sharding)
    return jax.tree.unflatten(structure, leaves)


@set_module("gda")
@public
def assert_fits(
    fun: Program, /, *args: Any, max_peak_bytes: int | None = None, **kwargs: Any
) -> None:
    """Fail unless a call ``fun(*args, **kwargs)`` fits into the memory of a device. For tests.

    Args:
      fun, args, kwargs: as for ``gda.rehearse``; nothing is run.
      max_peak_bytes: a bound on the peak on one device; by default the capacity of the devices.

    Raises:
      AssertionError: it does not fit; the message has the rehearsal.
      ValueError: there is no ``max_peak_bytes``, and the capacity of the devices is unknown.
      TypeError, Exception: as ``gda.rehearse``.

    >>> import gda, jax, numpy as np
    >>> gda.assert_fits(jax.numpy.sin, np.zeros(1000, np.float32), max_peak_bytes=10_000)
    """
    if max_peak_bytes is not None and (type(max_peak_bytes) is not int or max_peak_bytes < 0):
        raise ValueError(f"max_peak_bytes must be a number, 0 or more, not {max_peak_bytes!r}")
    found = rehearse(fun, *args, **kwargs)
    if max_peak_bytes is None and found.fits is None:
        raise ValueError(
            f"the memory of a device of kind {found.device_kind!r} is unknown; give max_peak_bytes"
        )
    limit = found.capacity_bytes if max_peak_bytes is None else max_peak_bytes
    is_above = max_peak_bytes is not None and (found.peak_bytes or 0) > max_peak_bytes
    if found.fits is False or is_above:
        peak = "too much memory" if found.peak_bytes is None else format_bytes(found.peak_bytes)
        raise AssertionError(
            f"{found.name} takes {peak} on a device, {format_size(limit)} are allowed\n{found}"
        )


# Compiling.


class _Build(NamedTuple):
    """A compilation; without a program if it does not fit, and then with the compiler's words.

    The bytes for arguments, outputs and temporaries, if XLA tells; the text of its buffers.
    """

    program: Compiled | None
    failure: str
    text: str
    allocated_bytes: int | None
    assignment: str


def _compiled(lowered: Lowered | Compiled, mesh: Mesh | None) -> _Build:
    failure, program = "", None
    with tempfile.TemporaryDirectory(prefix="gda-") as folder:
        options: dict[str, str | bool] = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        if "--xla_dump_to" in os.environ.get("XLA_FLAGS", ""):
            options = {}  # the user wants the files
        try:
            program = compiled(lowered, options)
        except JaxRuntimeError as error:
            failure = str(error)
            if "RESOURCE_EXHAUSTED" not in failure or "hbm" not in failure.lower():
                raise
            if mesh is None:
                error.add_note("gda.rehearse: for an answer, pass arguments that are on a mesh")
                raise
        report, assignment, text = _written_to(Path(folder))
    if program is not None:
        text = program.as_text() or ""
    total = re.search(r"^Total bytes: (\d+)", report, re.MULTILINE)
    return _Build(program, failure, text, None if total is None else int(total[1]), assignment)


def _written_to(folder: Path) -> list[str]:
    """Return the report on memory, the buffers, and the program; empty for those that XLA omits."""
    texts = []
    for end in ("-memory-usage-report", "-buffer-assignment", ""):
        paths = folder.glob(f"*after_optimizations{end}.txt")
        texts.append(next((path.read_text() for path in paths), ""))
    return texts


# The answers.


def _memory_of(program: Compiled, build: _Build, device: Any) -> dict[str, Any]:
    """Return the fields of a ``Rehearsal`` on the memory of a device."""
    memory: Any = program.memory_analysis()
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary = memory.temp_size_in_bytes
    if device.platform == "tpu":
        # libtpu's own temporaries may be more than the memory of a device that the program fits
        # into, and its peak has the memory on the chip too. The report has the buffers, and so has
        # JAX 0.12.
        total = getattr(memory, "total_allocation_bytes", memory.peak_memory_in_bytes)
        temporary = (build.allocated_bytes or total) - held
    peak = held + temporary + memory.generated_code_size_in_bytes
    capacity = _capacity_bytes(device)
    return {
        # The compiler for TPUs refuses programs that do not fit.
        "fits": None if capacity is None else device.platform == "tpu" or peak <= capacity,
        "capacity_bytes": capacity,
        "peak_bytes": peak,
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": temporary,
        "aliased_bytes": memory.alias_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def _memory_that_does_not_fit(
    build: _Build, arguments: Sequence[ArgumentBytes], device: Any
) -> dict[str, Any]:
    words = _NEEDED.search(build.failure)
    sizes = [] if words is None else [words.group(1, 2), words.group(3, 4)]
    needed, available = [int(float(n) * _UNITS[unit]) for n, unit in sizes] or (None, None)
    return {
        "fits": False,
        "capacity_bytes": available or _capacity_bytes(device),
        "peak_bytes": _the_more_exact(build.allocated_bytes, needed),
        "argument_bytes": sum(each.nbytes for each in arguments if not each.is_on_host),
        **dict.fromkeys(("output_bytes", "temporary_bytes", "aliased_bytes", "code_bytes")),
    }


def _collectives_of(
    build: _Build, schedule: Schedule | None, mesh: Mesh | None
) -> Collectives | None:
    """Return the collectives of a program; None for one that the compiler does not write."""
    shape = {} if mesh is None else dict(mesh.shape)
    if build.program is not None and (mesh is None or mesh.size == 1):
        return Collectives((), shape)
    return None if schedule is None else Collectives(schedule.collectives, shape)


def _the_more_exact(allocated: int | None, needed: int | None) -> int | None:
    """Return the bytes of the buffers if they round to the needed bytes; else these."""
    return allocated if allocated and allocated > 0.99 * (needed or 0) else needed


def _capacity_bytes(device: Any) -> int | None:
    """Return the memory of a device: its own limit, or for one that is not here the described."""
    try:
        limit = (device.memory_stats() or {}).get("bytes_limit")
    except JaxRuntimeError:  # it is not here
        limit = None
    kind = kind_of_device(device.device_kind)
    return limit or gpu_capacity_of(device) or (None if kind is None else kind.capacity_bytes)


def _mesh_of(tree: Any) -> Mesh | None:
    return next((mesh for mesh in meshes_of(tree) if isinstance(mesh, Mesh)), None)


def _links(mesh: Mesh | None) -> tuple[bool, list[int], Interconnect | None]:
    """Return True if some links are slow; the hosts of positions, if they decide it; the links."""
    devices = [] if mesh is None else [*mesh.devices.flat]
    links = links_of(devices, slices_of(mesh))
    if devices and devices[0].platform == "tpu":
        return len({getattr(device, "slice_index", 0) for device in devices}) > 1, [], links
    hosts = [device.process_index for device in devices]
    return len(set(hosts)) > 1, hosts, links


# The arguments.


def _arguments(
    stage: Traced | Lowered | Compiled,
    program: Compiled | None,
    given: Iterator[Any],
    mesh: Mesh | None,
    copied: Mapping[int, tuple[str, int]],
) -> Iterator[ArgumentBytes]:
    """Yield the used arrays of the call in order, with their names in the user's signature."""
    leaves = jax.tree_util.tree_flatten_with_path(stage.args_info)[0]
    names = [leaf_path(path[1:], "arguments") for path, _ in leaves]
    if isinstance(stage, Traced) and (given_names := stage.jaxpr.jaxpr.debug_info.arg_names):
        names = [re.sub(r"\['?(.*?)'?\]|\.", r"/\1", name) for name in given_names]
    shardings: list[Any] = [None] * len(leaves)
    if program is not None:
        # It has None for an unused argument, and so may a tree of arguments.
        structure = jax.tree.structure(stage.args_info)
        shardings = structure.flatten_up_to(program.input_shardings)
    for at, (name, (_, leaf), sharding) in enumerate(zip(names, leaves, shardings, strict=True)):
        # Static arguments, which the program does not have, are skipped: np.shape would ask for
        # the length of a range.
        found = next((each for each in given if getattr(each, "shape", ()) == leaf.shape), None)
        of_given = getattr(found, "sharding", None)
        if program is None:
            sharding = of_given
        elif sharding is None:
            continue
        # Of GPUs that are not here, the shardings of a program have no kind of memory.
        kinds = [getattr(each, "memory_kind", None) for each in (of_given, sharding)]
        yield ArgumentBytes(
            name=name.removesuffix("/array"),  # of a container of gda
            shape=tuple(leaf.shape),
            dtype=str(leaf.dtype),
            nbytes=_block_bytes(leaf, sharding),
            is_donated=leaf.donated,
            spec=_spec_of(sharding, leaf.shape, mesh),
            is_on_host=any(map(is_on_host, kinds)),
            copied_at=copied.get(at),
        )


def _block_bytes(leaf: Any, sharding: Any) -> int:
    block = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return packed_nbytes(math.prod(block), leaf.dtype)


def _spec_of(sharding: Any, shape: Shape, mesh: Mesh | None) -> tuple[SpecEntry, ...] | None:
    """Return the shortest spec of an argument; None for one without a spec over ``mesh``."""
    if mesh is None or not isinstance(sharding, NamedSharding) or sharding.mesh.shape != mesh.shape:
        return None
    with contextlib.suppress(TypeError, ValueError):  # unreduced axes have no fixed layout
        entries = check_spec(sharding.spec, shape, mesh.shape)
        return entries_of(axes_by_dimension(entries, len(shape), mesh.shape))
    return None


def _with_donations(
    arguments: Sequence[ArgumentBytes], lowered: Lowered | Compiled, program: Compiled | None
) -> tuple[ArgumentBytes, ...]:
    """Return the arguments with ``could_be_donated``; each result takes the memory of one.

    The blocks of the results are unknown without a program, and only shapes are compared.
    """
    leaves = jax.tree.leaves(lowered.out_info)
    shardings: list[Any] = [None] * len(leaves)
    if program is not None:
        shardings = jax.tree.leaves(program.output_shardings)

    def key(shape: Shape, dtype: Any, nbytes: int) -> tuple[Any, ...]:
        return tuple(shape), str(dtype), None if program is None else nbytes

    results = Counter(
        key(leaf.shape, leaf.dtype, _block_bytes(leaf, sharding))
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )
    keys = [key(each.shape, each.dtype, each.nbytes) for each in arguments]
    results.subtract(key for key, each in zip(keys, arguments, strict=True) if each.is_donated)
    found = []
    for of, each in zip(keys, arguments, strict=True):
        could_be = not (each.is_donated or each.is_on_host) and results[of] > 0
        results[of] -= could_be
        found.append(each._replace(could_be_donated=could_be))
    return tuple(found)
