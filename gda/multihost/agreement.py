"""Checks that all processes have the same arrays, and the errors if they do not.

A check goes through ``meeting``, without devices: first the digests of the descriptions, then, if
these differ, one description of each kind.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Compiled, Lowered

from gda.layout.boundary import FunctionT, hide_own_frames, public, set_module
from gda.mesh import Device, is_tracer, processes_of
from gda.multihost import coordination
from gda.multihost.background import wait_for_answers
from gda.multihost.descriptions import (
    Description,
    describe,
    stable_text,
)
from gda.multihost.failure_watch import FailureWatch, watched
from gda.multihost.meeting import (
    END_OF,
    refuse,
    refuse_all,
)
from gda.multihost.places import (
    Place,
    call_at,
    here,
    introduce,
    made_alone,
    of_thread,
    one_line,
    post,
)
from gda.multihost.steps import all_do, check_joined

T = TypeVar("T")

_DEFAULT_TIMEOUT = 60.0
_LONG_WAIT = 1800.0
_TIMEOUT_VARIABLE = "GDA_CHECK_AGREEMENT_TIMEOUT_SECONDS"


def communicates(
    name: str, among: Callable[[dict[str, Any]], Any] = lambda given: ()
) -> Callable[[FunctionT], FunctionT]:
    """Make a function ``public``, and tell other processes of its errors before the first meeting.

    After an error, such as that of an argument, the other processes raise a ``DisagreementError``
    with it in the same call. ``among`` takes the arguments by name, and returns a tree of the
    meshes, shardings and arrays whose processes are told, all processes if it has none; or ``None``
    if the call does not communicate.
    """

    def decorate(function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            before = of_thread.meetings
            try:
                return function(*args, **kwargs)
            except BaseException as error:
                if of_thread.meetings == before:
                    with suppress(Exception):  # the error of the call is the one to raise
                        given = _given(function, args, kwargs)
                        _tell_failure(error, name.format_map(given), among(given))
                hide_own_frames(error, called=function)
                raise

        return call  # pyright: ignore[reportReturnType]

    return decorate


def if_checked(layouts: str = "mesh", option: str = "") -> Callable[[dict[str, Any]], Any]:
    """Return ``among`` for a function that communicates to check, or if an option is given."""
    return lambda given: [given[layouts]] if given.get(option) or checks_are_on() else None


def _given(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name; a required one that is missing is None."""
    given = {
        name: None if each.default is each.empty else each.default
        for name, each in inspect.signature(function).parameters.items()
    }
    return given | dict(zip(given, args, strict=False)) | kwargs


def _tell_failure(error: BaseException, name: str, layouts: Any) -> None:
    if layouts is None or coordination.service() is None:
        return
    devices: set[Device] = set()
    with suppress(Exception):  # it is no tree, or has no devices
        for leaf in jax.tree.leaves(layouts):
            if is_tracer(leaf):
                return  # in a trace nothing communicates
            sharding = leaf if isinstance(leaf, Sharding) else getattr(leaf, "sharding", None)
            if isinstance(leaf, Mesh):
                devices.update(leaf.devices.flat)
            elif isinstance(sharding, Sharding):
                devices |= sharding.device_set
    processes = {device.process_index for device in devices} or range(jax.process_count())
    refuse(one_line(error), what=here(name), processes=tuple(sorted(processes)))


@set_module("gda")
@communicates("check {name!r}")
def check_processes_agree(
    tree: Any = None,
    *,
    program: Lowered | Compiled | None = None,
    name: str = "tree",
    timeout: float | None = None,
) -> None:
    """Check that every process has the same tree, and the same program.

    Of the tree it compares structure, shapes, dtypes, meshes and specs, and no values. It
    communicates through JAX's coordination service, so that a disagreement never hangs, in a few
    milliseconds. Every process must call it, in the same order of checks. Inside
    ``gda.checking_agreement()`` every constructor checks.

    Args:
      tree: a pytree of ``GlobalArray``s, ``jax.Array``s, NumPy arrays, ``ShapeDtypeStruct``s,
        shardings, meshes, specs and scalars. Meshes are compared with their order of devices.
      program: a lowered or compiled function, such as ``jax.jit(step).lower(*args)``, whose text is
        compared, with every number that a step has taken from outside, such as a learning rate.
      name: name of the tree in messages; processes that check different names disagree.
      timeout: seconds to wait for the other processes, slow reads included; by default the
        environment variable ``GDA_CHECK_AGREEMENT_TIMEOUT_SECONDS``, or 60.

    Raises, in every process:
      DisagreementError: the processes differ. It names the processes in the minority, the first
        paths and fields, and of programs the first line.
      LateProcessError: a process did not come in time. It names that process, its last check and
        the check where the others wait.
      ConnectionError: process 0, which runs the service, has ended.
      TypeError: ``program`` is neither lowered nor compiled.
      RuntimeError: the launcher started this process, and ``gda.launch.initialize`` was not called.

    >>> import gda, jax, numpy as np
    >>> gda.check_processes_agree({'w': jax.ShapeDtypeStruct((8, 2), 'float32')}, name='params')
    >>> step = jax.jit(lambda w: w - 0.1 * w).lower(np.ones(8))
    >>> gda.check_processes_agree(program=step)
    """
    if not isinstance(program, Lowered | Compiled | None):
        raise TypeError(
            f"program is a {type(program).__name__}; pass a lowered function, as "
            "program=jax.jit(step).lower(*args)"
        )
    seconds = timeout_of_checks() if timeout is None else _seconds(timeout, "timeout")

    def described(_: None) -> Description:
        text = "" if program is None else program.as_text() or ""
        return describe(tree) | ({("program", "text"): text} if text else {})

    all_do(lambda: None, what=f"check {name!r}", timeout=seconds, agreed=described)


@set_module("gda")
@public
def checking_agreement(
    enabled: bool = True, *, timeout: float | None = None
) -> AbstractContextManager[None]:
    """Return a context in which every constructor checks that the processes agree, or none does.

    A constructor with a callback compares shape, dtype, mesh and spec over the processes of the
    mesh before it reads. After building, all constructors but ``from_array`` compare their results,
    so that all processes hear of a failure in one at once. Functions that communicate check in any
    case, and wait longer outside such a block. Only the main thread checks: others may run in
    another order in each process. The environment variable ``GDA_CHECK_AGREEMENT=1`` switches this
    on for the whole program, and ``0`` off; the launcher and the pytest plugin switch it on.

    Args:
      enabled: False for a block in which constructors do not check.
      timeout: as for ``check_processes_agree``.

    >>> import gda, jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> with gda.checking_agreement(timeout=30):
    ...     g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda index: np.zeros(1))
    """
    seconds = None if timeout is None else _seconds(timeout, "timeout")
    return _switched(_ConstructorChecks(bool(enabled), seconds))


def together(
    name: str,
    mesh: Any,
    work: Callable[[Any], T],
    *,
    prepare: Callable[[], Any] = lambda: None,
    request: Callable[[Any], Description] | None = None,
    communicates: bool | None = None,
    always: bool = False,
) -> T:
    """Return the result of ``work``, when all processes of the mesh have succeeded and agree.

    First each prepares alone, by ``prepare``, and they compare the ``request`` for it. Then
    ``work`` takes the prepared value, and they compare its results. If checks are off, they compare
    the request only if ``work`` ``communicates``, and both only ``always``. Checks inside ``work``
    are off. ``prepare`` or ``work`` must reject a mesh that is none. ``communicates`` is None if no
    option decides it.
    """
    introduce()
    compares = always or checks_are_on()
    if not compares and communicates is None:
        return work(prepare())
    if isinstance(mesh, NamedSharding):
        mesh = mesh.mesh
    processes = processes_of(mesh).numbers if isinstance(mesh, Mesh) else ()
    if compares or communicates:
        check_joined()
    takes_part = len(processes) > 1 and jax.process_index() in processes
    if not takes_part or not (compares or communicates):
        try:
            return work(prepare())
        finally:
            if takes_part:
                tells_alone(name, "read_once is False")
    timeout = timeout_of_checks() if compares else timeout_of_calls()
    step = functools.partial(all_do, timeout=timeout, processes=processes)
    prepared = prepare()
    if request:
        fields = request(prepared)
        step(lambda: None, what=name, agreed=lambda _: fields)
    if not compares:
        return work(prepared)

    def unchecked() -> T:
        with _switched(_ConstructorChecks(False, timeout)):
            return work(prepared)

    return step(unchecked, what=END_OF + name, agreed=describe, share=lambda _: None).mine


def tells_alone(name: str, reason: str) -> None:
    """Tell processes that wait at a call that this one has made it alone; they give up soon."""
    if jax.process_count() == 1 or threading.current_thread() is not threading.main_thread():
        return
    if (service := coordination.service()) is not None:
        call = call_at(name)
        made_alone[call] += 1
        what = f"{here(name)}, which does not communicate: {reason}"
        place = Place(what, group=call, alone=made_alone[call])
        with suppress(Exception):
            wait_for_answers(lambda: post(service, place))


def check_same_call(
    name: str,
    tree: Any,
    arguments: Mapping[str, object],
    processes: tuple[int, ...] | None = None,
    timeout: float | None = None,
) -> None:
    """Check that some processes, by default all, make the same call of a function.

    A function that communicates begins with this check, or a step that is ``agreed``, also where
    checks are off, and is decorated with ``communicates``. Afterwards the arrays of the tree are
    computed.
    """
    if jax.process_count() == 1:
        check_joined()
        return
    fields = call_fields(tree, arguments)  # not in the step, so that an error is told at once
    all_do(
        lambda: None,
        what=name,
        timeout=timeout_of_calls() if timeout is None else timeout,
        agreed=lambda _: fields,
        processes=processes,
    )
    wait_for_arrays(name, tree, processes)


def wait_for_arrays(name: str, tree: Any, processes: tuple[int, ...] | None = None) -> None:
    """Wait for the arrays of a tree, which some processes, by default all, may compute together.

    Raises a ``LateProcessError`` if one has ended; a read of the arrays would never return.
    """
    everybody = tuple(range(jax.process_count()))
    if not everybody[1:]:
        return
    arrays = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not is_tracer(leaf) and not leaf.is_deleted()
    ]
    if not all(array.is_fully_addressable for array in arrays):
        watched(lambda: jax.block_until_ready(arrays), here(name), processes or everybody)


def call_fields(tree: Any, arguments: Mapping[str, object]) -> Description:
    """Return the layouts and arguments that must be the same in all processes of a call."""
    given = {("", argument): stable_text(value) for argument, value in arguments.items()}
    return given | describe(tree) | given  # first, and in place of a field of the same name


@contextmanager
def watching(name: str, processes: tuple[int, ...]) -> Iterator[FailureWatch]:
    """Watch some processes that work together; if one fails or ends, all raise."""
    watch = FailureWatch(here(name), processes, timeout_of_checks())
    with watch.called():
        yield watch


# The end of this process.


# Registered after JAX's exit hook, and so called before it: JAX waits at exit for all processes,
# which may wait for this one.
@atexit.register
def _end() -> None:
    service = coordination.service()
    if service is not None and coordination.has_backends():
        refuse_all(service)


# The checks of constructors, and the timeout.


class _ConstructorChecks(NamedTuple):
    is_on: bool
    timeout: float | None  # seconds; None for that of the environment


_OF_ENVIRONMENT = _ConstructorChecks(
    os.environ.get("GDA_CHECK_AGREEMENT", "") not in ("", "0"), None
)
_checks: ContextVar[_ConstructorChecks] = ContextVar("checking_agreement", default=_OF_ENVIRONMENT)


@contextmanager
def _switched(checks: _ConstructorChecks) -> Iterator[None]:
    token = _checks.set(checks)
    try:
        yield
    finally:
        _checks.reset(token)


def checks_are_on() -> bool:
    """Return True where constructors check."""
    # Other threads may run in another order in each process.
    return _checks.get().is_on and threading.current_thread() is threading.main_thread()


def timeout_of_checks() -> float:
    """Return the seconds that a check waits for the other processes."""
    if (seconds := _checks.get().timeout) is not None:
        return seconds
    given = os.environ.get(_TIMEOUT_VARIABLE)
    return _DEFAULT_TIMEOUT if given is None else _seconds(given, _TIMEOUT_VARIABLE)


def timeout_of_calls() -> float:
    """Return the seconds to wait for processes that are to make the same call."""
    return timeout_of_checks() if checks_are_on() else timeout_of_work()


def timeout_of_work() -> float:
    """Return the seconds to wait for processes that may still work long."""
    return max(timeout_of_checks(), _LONG_WAIT)


def _seconds(value: float | str, name: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"{name} must be a number of seconds above 0, not {value!r}")
    return seconds
