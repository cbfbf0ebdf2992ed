"""The accelerators of this machine, found without JAX, which takes long to look for them."""

from __future__ import annotations

import pkgutil
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

_DEVICES = Path("/dev")


def has_tpu() -> bool:
    """Return True if this machine has a TPU."""
    return any(_DEVICES.glob("accel*")) or any(_DEVICES.glob("vfio/[0-9]*"))


def has_gpu() -> bool:
    """Return True if this machine has a GPU of NVIDIA."""
    return any(_DEVICES.glob("nvidia[0-9]*")) or (_DEVICES / "dxg").exists()


def has_only_compilers() -> bool:
    """Return True if JAX has compilers for TPUs or GPUs here, and no accelerator.

    JAX then finds the CPU only, after libtpu has waited and printed errors, and the plugin for CUDA
    a traceback. Any other plugin of JAX may have a device of its own.
    """
    names = _plugins()
    return (
        (find_spec("libtpu") is not None or bool(names))
        and all(name.startswith("xla_cuda") for name in names)
        and not has_tpu()
        and not has_gpu()
    )


def _plugins() -> list[str]:
    """Return the names of JAX's plugins, of both kinds."""
    folder = find_spec("jax_plugins")
    modules = [] if folder is None else pkgutil.iter_modules(folder.submodule_search_locations)
    return [each.name for each in (*modules, *entry_points(group="jax_plugins"))]
