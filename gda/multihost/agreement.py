"""Checks that all processes have the same arrays, and the errors if they do not.

A check goes through ``meeting``, without devices: first the digests of the descriptions, then, if
these differ, one description of each kind.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from hashlib import sha256
from itertools import chain
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import jax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.stages import Compiled, Lowered

from gda.layout.boundary import FunctionT, frame_of_caller, hide_own_frames, set_module
from gda.layout.text import (
    MOST_CHARACTERS,
    MOST_NAMED,
    format_processes,
    join_some,
    shortened,
    where_they_differ,
)
from gda.mesh import Device, is_tracer, processes_of
from gda.multihost import coordination
from gda.multihost.background import wait_for_answers
from gda.multihost.descriptions import (
    STRUCTURE,
    Description,
    describe,
    describe_wanted,
    leaf_fields,
    stable_text,
)
from gda.multihost.failure_watch import FailureWatch, watched
from gda.multihost.meeting import (
    END_OF,
    DisagreementError,
    meet,
    refuse,
    refuse_all,
    with_calls,
)
from gda.multihost.places import (
    Place,
    call_at,
    introduce,
    made_alone,
    of_thread,
    one_line,
    post,
)
from gda.multihost.steps import Done, all_do

P = ParamSpec("P")
T = TypeVar("T")

_DEFAULT_TIMEOUT = 60.0
_LONG_WAIT = 1800.0
_NO_TREE: Any = object()
# Of the message of a difference.
_CHARACTERS_OF_VALUES = 280
_CHARACTERS_OF_PATH = 160
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


@overload
def check_processes_agree(  # pyright: ignore[reportOverlappingOverload]
    *, timeout: float | None = None
) -> AbstractContextManager[None]: ...
@overload
def check_processes_agree(
    tree: Any = ...,
    *,
    program: Lowered | Compiled | None = None,
    name: str = "tree",
    timeout: float | None = None,
) -> None: ...
@set_module("gda")
@communicates("check {name!r}", lambda given: None if _is_context(**given) else ())
def check_processes_agree(
    tree: Any = _NO_TREE,
    *,
    program: Lowered | Compiled | None = None,
    name: str = "tree",
    timeout: float | None = None,
) -> AbstractContextManager[None] | None:
    """Check that every process has the same tree, and the same program.

    Of the tree it compares structure, shapes, dtypes, meshes and specs, and no values. It
    communicates through JAX's coordination service, so that a disagreement never hangs, in a few
    milliseconds. Every process must call it, in the same order of checks.

    With neither it is a context: inside ``with gda.check_processes_agree():`` every
    constructor checks. One with a callback compares shape, dtype, mesh and spec over the processes
    of the mesh before it reads. After building, all constructors but ``from_array`` compare their
    results, so that all processes hear of a failure in one at once. Functions that communicate
    check in any case, and wait longer outside such a block. Only the main thread checks: others
    may run in another order in each process. The environment variable ``GDA_CHECK_AGREEMENT=1``
    switches this on for the whole program, and ``0`` off; the launcher and the pytest plugin switch
    it on.

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
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> with gda.check_processes_agree(timeout=30):
    ...     g = gda.GlobalArray.from_callback((8,), mesh, ['x'], lambda index: np.zeros(1))
    """
    if _is_context(tree, program):
        return checking_agreement(timeout=timeout)
    if not isinstance(program, Lowered | Compiled | None):
        raise TypeError(
            f"program is a {type(program).__name__}; pass a lowered function, as "
            "program=jax.jit(step).lower(*args)"
        )
    seconds = timeout_of_checks() if timeout is None else _seconds(timeout, "timeout")

    def described(_: None) -> Description:
        fields = {} if tree is _NO_TREE else describe(tree)
        text = "" if program is None else program.as_text() or ""
        return fields | ({("program", "text"): text} if text else {})

    done_by_all(lambda: None, described, "check", timeout=seconds, label=repr(name))
    return None


def _is_context(tree: Any, program: Any, **_: Any) -> bool:
    return tree is _NO_TREE and program is None


def checking_agreement(
    enabled: bool = True, *, timeout: float | None = None
) -> AbstractContextManager[None]:
    """Switch the check inside every constructor on or off, for the block."""
    seconds = None if timeout is None else _seconds(timeout, "timeout")
    return _switched(_ConstructorChecks(bool(enabled), seconds))


def checked(
    name: str, *, reads: bool = True
) -> Callable[[Callable[P, jax.Array]], Callable[P, jax.Array]]:
    """Make a constructor check its result, and its arguments first if it ``reads`` long."""

    def decorate(construct: Callable[P, jax.Array]) -> Callable[P, jax.Array]:
        signature = inspect.signature(construct)
        call: Any = construct

        @functools.wraps(construct)
        def constructor(*args: P.args, **kwargs: P.kwargs) -> jax.Array:
            introduce()
            if not checks_are_on():
                return construct(*args, **kwargs)
            arguments: Any = signature.bind(*args, **kwargs)
            given = arguments.arguments
            for field in ("global_shape", "spec"):
                if hasattr(given.get(field), "__next__"):  # which can be read only once
                    given[field] = tuple(given[field])
            return together(
                name.replace("Global", "Padded") if given.get("pad") else name,
                given["mesh"],
                lambda _: call(*arguments.args, **arguments.kwargs),
                lambda array: leaf_fields("", array),
                request=(lambda _: describe_wanted(given)) if reads else None,
            )

        return constructor

    return decorate


def together(
    name: str,
    mesh: Any,
    work: Callable[[Any], T],
    outcome: Callable[[T], Description] = lambda _: {},
    *,
    prepare: Callable[[], Any] = lambda: None,
    request: Callable[[Any], Description] | None = None,
    communicates: bool | None = None,
    always: bool = False,
) -> T:
    """Return the result of ``work``, after all processes of the mesh have done theirs and agree.

    First each prepares alone, by ``prepare``, and they compare the ``request`` for it. Then
    ``work`` takes the prepared value, and they compare the ``outcome``. If checks are off, they
    compare the request only if ``work`` ``communicates``, and both only ``always``. Checks inside
    ``work`` are off. ``prepare`` or ``work`` must reject a mesh that is none. ``communicates`` is
    None if no option decides it.
    """
    if isinstance(mesh, NamedSharding):
        mesh = mesh.mesh
    introduce()
    processes = processes_of(mesh).numbers if isinstance(mesh, Mesh) else ()
    compares = always or checks_are_on()
    if compares or communicates:
        _check_joined()
    takes_part = len(processes) > 1 and jax.process_index() in processes
    if not takes_part or not (compares or communicates):
        try:
            return work(prepare())
        finally:
            if takes_part and communicates is False:
                tells_alone(name, "read_once is False")
    timeout = timeout_of_checks() if compares else None
    prepared = prepare()
    if request:
        fields = request(prepared)
        done_by_all(lambda: None, lambda _: fields, name, processes, timeout)
    if not compares:
        return work(prepared)

    def unchecked() -> T:
        with _switched(_ConstructorChecks(False, timeout)):
            return work(prepared)

    return done_by_all(unchecked, outcome, END_OF + name, processes, timeout).mine


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

    A function that communicates begins with this check or ``done_by_all``, also where checks are
    off, and is decorated with ``communicates``. Afterwards the arrays of the tree are computed.
    """
    # Not in the step, so that an error is told at once. One process alone describes nothing.
    fields = call_fields(tree, arguments) if jax.process_count() > 1 else {}
    done_by_all(lambda: None, lambda _: fields, name, processes, timeout)
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


def done_by_all(
    work: Callable[[], T],
    outcome: Callable[[T], Description],
    name: str,
    processes: tuple[int, ...] | None = None,
    timeout: float | None = None,
    label: str = "",
    *,
    share: Callable[[T], Any] = lambda _: None,
    decide: Callable[[dict[int, Any]], Any] = lambda _: None,
    **options: Any,
) -> Done[T]:
    """Do a step of some processes, by default all, with ``all_do``, and compare the outcomes.

    All raise a ``DisagreementError`` if their outcomes differ, also where checks are off; it then
    waits long by default. One ``decide``s only if they agree. ``label`` is the user's name for this
    call, and the ``options`` are those of ``all_do``.
    """
    _check_joined()
    processes = tuple(range(jax.process_count())) if processes is None else processes
    if len(processes) < 2 or jax.process_index() not in processes:
        mine = work()
        return Done(mine, decide({jax.process_index(): share(mine)}), [])
    if timeout is None:
        timeout = timeout_of_calls()
    what = here(f"{name} {label}".rstrip())
    call = {("", name): label} if label else {("", "call"): name}

    def described() -> tuple[T, bytes]:
        result = work()
        fields = call | outcome(result)
        return result, json.dumps([[*key, value] for key, value in fields.items()]).encode()

    def judge(parts: dict[int, Any]) -> dict[str, Any]:
        if difference := compare_digests(parts):
            return {"difference": difference}
        return {"decision": decide({process: part[2] for process, part in parts.items()})}

    done = all_do(
        described,
        share=lambda mine: [sha256(mine[1]).hexdigest(), what, share(mine[0])],
        decide=judge,
        kind="digests",
        what=what,
        timeout=timeout,
        processes=processes,
        **options,
    )
    result, text = done.mine
    if difference := done.decision.get("difference"):
        mine = zlib.compress(text) if jax.process_index() in difference["spokesmen"] else b""
        say = functools.partial(say_difference, difference["groups"])
        differences = meet(
            mine, say, kind="descriptions", what=what, timeout=timeout, processes=processes
        )
        error = DisagreementError(f"{what}: {differences.decode()}{difference['places']}")
        raise with_calls(error, difference["calls"])
    return Done(result, done.decision["decision"], done.parts)


@contextmanager
def watching(name: str, processes: tuple[int, ...]) -> Iterator[FailureWatch]:
    """Watch some processes that work together; if one fails or ends, all raise."""
    watch = FailureWatch(here(name), processes, timeout_of_checks())
    with watch.called():
        yield watch


def here(name: str) -> str:
    """Return a call with the line of the program that makes it: ``gda.load_tree (train.py:31)``."""
    frame, _ = frame_of_caller()
    if frame is None:
        return f"{name} (an unknown place)"
    return f"{name} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"


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


def _check_joined() -> None:
    """Raise if this process was started as one of many and has not joined the others."""
    count = os.environ.get("JAX_NUM_PROCESSES", "1")
    if count != "1" and jax.process_count() == 1:
        raise RuntimeError(
            f"JAX_NUM_PROCESSES says {count} processes, but JAX has only this one; call "
            "gda.launch.initialize() before any other use of JAX"
        )


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


# The difference of descriptions.


def compare_digests(parts: dict[int, Sequence[Any]]) -> dict[str, Any]:
    """Compare digests and places of processes: return nothing, or the groups that differ."""
    groups: dict[str, list[int]] = {}
    places: dict[str, list[int]] = {}
    for process, (digest, place, *_) in sorted(parts.items()):
        groups.setdefault(digest, []).append(process)
        places.setdefault(place, []).append(process)
    if len(groups) == 1:
        return {}
    heard = sorted(groups.values(), key=len)
    if len(heard) > MOST_NAMED:
        # The majority and the smallest groups are enough.
        heard = [*heard[: MOST_NAMED - 1], heard[-1]]
    where = [f"{format_processes(group)} at {place}" for place, group in places.items()]
    apart = join_some(where, MOST_CHARACTERS / 3)
    return {
        "groups": heard,
        "spokesmen": [group[0] for group in heard],
        "calls": [*places],
        "places": f". They are at different places: {apart}" if where[1:] else "",
    }


def say_difference(groups: list[list[int]], payloads: dict[int, bytes]) -> bytes:
    """Return the fields in which the groups differ, from descriptions by their first processes."""
    descriptions: list[Description] = [
        {(path, field): value for path, field, value in json.loads(zlib.decompress(payload))}
        for payload in (payloads[group[0]] for group in groups)
    ]
    return f"the processes do not agree: {first_differences(groups, descriptions)}".encode()


def first_differences(groups: Sequence[list[int]], descriptions: Sequence[Description]) -> str:
    """Return the first paths and fields in which the descriptions of groups differ, in words."""
    keys = dict.fromkeys(key for each in descriptions for key in each)
    # The call comes first, and the structure last: most differences of it show at a path.
    in_order = sorted(keys, key=lambda key: (key == STRUCTURE, key[0] != ""))
    return join_some([*_differences(groups, descriptions, in_order)], MOST_CHARACTERS)


def _differences(
    groups: Sequence[list[int]],
    descriptions: Sequence[Description],
    keys: Iterable[tuple[str, str]],
) -> Iterator[str]:
    """Yield the first field of each path that differs, and the paths that some groups lack."""
    paths = [{path for path, _ in each} for each in descriptions]
    seen: set[str] = set()
    for path, field in keys:
        holders: dict[str, list[int]] = {}
        for group, description in zip(groups, descriptions, strict=True):
            holders.setdefault(description.get((path, field), "missing"), []).extend(group)
        is_known = path and path in seen  # of the call, whose path is empty, all fields are named
        if len(holders) == 1 or is_known or (seen and (path, field) == STRUCTURE):
            continue
        seen.add(path)
        where = shortened(path, _CHARACTERS_OF_PATH)
        having = [group for group, known in zip(groups, paths, strict=True) if path in known]
        if len(having) < len(groups):
            yield f"only in {format_processes(chain.from_iterable(having))}: {where}"
            continue
        values = sorted(holders, key=lambda value: len(holders[value]))
        shown = where_they_differ(values, _CHARACTERS_OF_VALUES // len(values))
        minority, *others = [
            (format_processes(holders[value]), text)
            for value, text in zip(values, shown, strict=True)
        ]
        first = f"{minority[0]}: {field} {minority[1]}"
        yield ", ".join([*([f"at {where}"] if path else []), first, *map(": ".join, others)])
