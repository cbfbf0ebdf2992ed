"""The facts about a program that a report of a fault needs.

Provisional: see ``docs/stable.md``.
"""

from __future__ import annotations

import os
import platform
from collections import Counter
from importlib.metadata import PackageNotFoundError, version

import jax

from gda.layout.boundary import public, set_module
from gda.layout.distribution import DISTRIBUTION
from gda.layout.text import counted, listed, printable

_PACKAGES = (
    *(DISTRIBUTION, "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu"),
    *("numpy", "ml_dtypes", "tensorstore", "safetensors", "orbax-checkpoint"),
)
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


@set_module("gda")
@public
def report() -> str:
    """Return versions, devices, processes and settings, for a report of a fault.

    It has no path, host or user, except in ``XLA_FLAGS`` and ``LIBTPU_INIT_ARGS``: read it before
    you publish it. It starts JAX's devices if nothing has; an error of that is a part of it.

    >>> import gda
    >>> print(gda.report())  # doctest: +ELLIPSIS
    jax-gda ...
    """
    found = [f"{name} {of}" for name in _PACKAGES if (of := _version(name))]
    lines = [
        ", ".join(found),
        f"Python {platform.python_version()}, {platform.system()} {platform.machine()}, "
        f"{counted(os.cpu_count() or 1, 'core')}",
        _devices(),
        *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ),
    ]
    return "\n".join(map(printable, lines))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _devices() -> str:
    try:
        kinds = Counter(f"{each.device_kind} ({each.platform})" for each in jax.devices())
    except RuntimeError as error:  # a driver that is too old, a TPU that another program has
        return f"no devices: {error}"
    process = f"process {jax.process_index()} of {jax.process_count()}"
    return f"{listed([f'{count} x {kind}' for kind, count in kinds.items()])}; {process}"
