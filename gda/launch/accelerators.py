"""The accelerators of this machine, found without JAX, which takes long to look for them."""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

_DEVICES = Path("/dev")


def has_tpu() -> bool:
    """Return True if this machine has a TPU."""
    return any(_DEVICES.glob("accel*")) or any(_DEVICES.glob("vfio/[0-9]*"))


def has_only_libtpu() -> bool:
    """Return True if libtpu is installed, but no TPU, and no plugin of JAX for anything else.

    JAX then finds the CPU only, after it has started libtpu, which waits and prints errors.
    """
    return (
        find_spec("libtpu") is not None
        and not has_tpu()
        and find_spec("jax_plugins") is None
        and not entry_points(group="jax_plugins")
    )
