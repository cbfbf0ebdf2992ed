"""The communication of a jitted function, which is compiled and read, never run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.stages import Compiled

from gda.compiled.communication_rules import Allowed, check_axes, complaints_of, rules_of
from gda.compiled.hlo import (
    Collectives,
    Module,
    ProgramMesh,
    modules_of,
    num_devices,
    read_collectives,
)
from gda.compiled.programs import Program, compiled, meshes_of, stage_of, unwrapped
from gda.layout.boundary import public, set_module
from gda.mesh import check_mesh


@set_module("gda")
@public
def collectives(
    fun: Program,
    /,
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Any,
) -> Collectives:
    """Return the collectives that a call ``fun(*args, **kwargs)`` will execute.

    The function is compiled for these arguments and the optimised program is read. Nothing is run
    or allocated. The list holds for this version of XLA and this kind of device. If there are
    several processes, all should call it, since XLA may share the work among them.

    Arrays that a plain ``fun`` closes over become constants, which are not sharded: pass them as
    arguments. A function that has run already keeps its program, perhaps with the lines of an older
    source, as a ``Compiled`` does.

    Args:
      fun: a function made by ``jax.jit`` or ``gda.jit``, a method or ``functools.partial`` of one,
        or any callable, which is then jitted; or a stage of one (``jax.stages.Traced``,
        ``Lowered`` or ``Compiled``), without arguments.
      args, kwargs: as for a call: arrays, ``GlobalArray``s, trees of them, static arguments; or in
        their place ``jax.ShapeDtypeStruct`` with a ``sharding``, which need no memory.
      mesh: the mesh with the names of the axes; by default that of the first argument that has one,
        else of a result, else of ``jax.set_mesh``. Pass a function with its own keyword argument
        ``mesh`` as ``functools.partial(fun, mesh=…)``.

    Raises:
      TypeError: ``fun`` is not callable, ``mesh`` is no mesh, or a compiled program comes
        with arguments.
      ValueError: no argument is placed on a mesh and the program is for one device, so it does
        not communicate; ``mesh`` has another number of devices than the program; or the program has
        a collective that cannot be read.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ('x', 'y'))
    >>> a = jax.ShapeDtypeStruct((16, 32), np.float32, sharding=NamedSharding(mesh, P(None, 'y')))
    >>> b = jax.ShapeDtypeStruct((32, 8), np.float32, sharding=NamedSharding(mesh, P('y')))
    >>> print(gda.collectives(lambda a, b: a @ b, a, b))  # doctest: +ELLIPSIS
    1 collective on the mesh {'x': 2, 'y': 4}; bytes are of the operands on one device
      collective  over  operands       times  bytes  from
      all-reduce  y     float32[16,8]  1      512 B  ...:1
      total       y                    1      512 B
    """
    _check_mesh(mesh)
    fun, args, kwargs = unwrapped(fun, args, kwargs)
    program = compiled(stage_of(fun, args, kwargs))
    text = program.as_text() or ""
    mesh = _mesh_of(program, num_devices(text), mesh, (args, kwargs))
    return Collectives(read_collectives(modules_in(text, mesh)), dict(mesh.shape))


@set_module("gda")
@public
def assert_collectives(
    fun: Program,
    /,
    *args: Any,
    allow: Allowed,
    mesh: Mesh | AbstractMesh | None = None,
    **kwargs: Any,
) -> None:
    """Fail unless a call ``fun(*args, **kwargs)`` communicates only what is allowed. For tests.

    ``allow`` has the allowed kinds of collectives, their axes and their numbers:

    - ``[]``: nothing is allowed.
    - ``['all-reduce']``: all-reduces over any axes, in any number.
    - ``{'all-reduce': 'data'}``: all-reduces over the axis ``'data'`` only.
    - ``{'all-reduce': ('data', 'model')}``: over these two axes at once.
    - ``[('all-reduce', 'data'), ('all-reduce', 'model')]``: over one or the other.
    - ``{('all-reduce', 'data'): 1}``: exactly one over ``'data'``.
    - ``{'all-reduce': 2}``: exactly two in all, over any axes.

    A number counts executions in one call: a collective in a loop of 7 counts as 7, and one in a
    branch counts as executed. XLA may combine or split collectives, above all for gradients of many
    parameters: name the axis instead if that must not matter.

    Args:
      fun, args, kwargs, mesh: as for ``gda.collectives``; nothing is run.
      allow: as above.

    Raises:
      AssertionError: it communicates anything else; the message lists it with its source lines.
      TypeError, ValueError: ``allow`` names an unknown kind or an axis that the mesh lacks, found
        before compiling if ``mesh`` is given. Others as ``gda.collectives``.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import NamedSharding, PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('data',))
    >>> x = jax.ShapeDtypeStruct((64, 4), np.float32, sharding=NamedSharding(mesh, P('data')))
    >>> w = jax.ShapeDtypeStruct((4,), np.float32, sharding=NamedSharding(mesh, P()))
    >>> step = jax.jit(jax.grad(lambda w, x: (x @ w).sum()))
    >>> gda.assert_collectives(step, w, x, allow={('all-reduce', 'data'): 1})
    """
    rules = rules_of(allow)
    _check_mesh(mesh)
    if mesh is not None:
        check_axes(rules, dict(mesh.shape))
    found = collectives(fun, *args, mesh=mesh, **kwargs)
    check_axes(rules, found.mesh_shape)
    complaints = complaints_of(found, rules)
    if complaints:
        inside, _, _ = unwrapped(fun, args, kwargs)
        name = getattr(inside, "__name__", type(inside).__name__)
        allowed = "; ".join(map(str, rules)) + "; nothing else" if rules else "nothing"
        raise AssertionError(
            "\n".join([f"{name} may communicate: {allowed}", *complaints, f"found: {found}"])
        )


# The program and its mesh.


def modules_in(text: str, mesh: Mesh | AbstractMesh | None) -> list[Module]:
    """Parse the text of a program over a mesh."""
    slices = slices_of(mesh)
    ids = [device.id for device in mesh.devices.flat] if slices and isinstance(mesh, Mesh) else ()
    shape = {} if mesh is None else dict(mesh.shape)
    return modules_of(text, ProgramMesh(shape, slices, ids))


def slices_of(mesh: Mesh | AbstractMesh | None) -> dict[str, int]:
    """Return the number of slices of TPUs along each axis that goes over several."""
    # GPUs may have a slice_index too, but their programs are for all devices.
    if not isinstance(mesh, Mesh) or mesh.devices.flat[0].platform != "tpu":
        return {}
    slice_of = np.vectorize(lambda device: getattr(device, "slice_index", 0))(mesh.devices)
    along = {
        name: len(np.unique(np.moveaxis(slice_of, axis, 0).reshape(size, -1)[:, 0]))
        for axis, (name, size) in enumerate(mesh.shape.items())
    }
    return {name: count for name, count in along.items() if count > 1}


def _check_mesh(mesh: Mesh | AbstractMesh | None) -> None:
    if mesh is not None:
        check_mesh(mesh, (Mesh, AbstractMesh))  # pyright: ignore[reportArgumentType]


def _mesh_of(
    program: Compiled, devices: int, mesh: Mesh | AbstractMesh | None, arguments: Any
) -> Mesh | AbstractMesh:
    shardings = (program.input_shardings, program.output_shardings)
    for known in [mesh] if mesh is not None else meshes_of((arguments, shardings)):
        if known.size == devices * math.prod(slices_of(known).values()):
            return known
    if devices == 1:
        which = "a mesh" if mesh is None else f"the mesh {dict(mesh.shape)}"
        raise ValueError(
            f"no argument is placed on {which}, so the program is for one device and does not "
            "communicate; pass arrays over a mesh, or jax.ShapeDtypeStruct(shape, dtype, "
            "sharding=NamedSharding(mesh, spec))"
        )
    given = "no argument or result has a mesh"
    if mesh is not None:
        given = f"the mesh {dict(mesh.shape)} has {mesh.size} devices"
    raise ValueError(
        f"{given}, but the program is compiled for {devices} devices; pass the mesh that its "
        "arguments are sharded over as mesh="
    )
