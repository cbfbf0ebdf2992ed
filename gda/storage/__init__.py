"""Sources to read, targets to write, and the loop that runs many reads or writes at a time.

Read in this order: ``options`` (threads, bytes, retries, progress), ``tasks`` (runs reads and
writes), ``casts`` (to another dtype, or an error), ``sources`` (anything that slices),
``views`` (of sources, transposed, joined and cast without a read), ``targets`` (anything that takes
slices), ``chunk_conflicts`` (blocks that share a chunk of a target), ``read_boxes`` (of a source
that is read to be written), ``system_calls`` (on files), ``safetensors_format``,
``safetensors``, ``new_files`` (written by several processes, put in place whole),
``safetensors_model`` (new files in place of old ones), ``stores`` (directories and object stores,
for checkpoints), ``orbax_runs`` (of another library), ``golden_files`` (documents of tests).
``save_safetensors`` is in ``gda.trees``, because it needs meshes and processes.

>>> import gda, jax, numpy as np, os, tempfile
>>> from safetensors.numpy import save_file
>>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ('x', 'y'))
>>> with tempfile.TemporaryDirectory() as folder:
...     save_file({'w': np.ones((8, 2), np.float32)}, os.path.join(folder, 'model.safetensors'))
...     tensors = gda.storage.open_safetensors(folder)
...     print(gda.load_tree(tensors, mesh, jax.sharding.PartitionSpec('x', 'y'))['w'])
float32[8,2] P('x', 'y')
"""

from importlib import import_module
from typing import Any

_MODULE_OF = {
    "open_safetensors": "gda.storage.safetensors",
    "SafetensorsFiles": "gda.storage.safetensors",
    "SafetensorsTensor": "gda.storage.safetensors",
    "open_orbax": "gda.storage.orbax_runs.open_orbax",
    "save_safetensors": "gda.trees.files.save_safetensors",
    "LazyArray": "gda.storage.views.lazy",
    "lazy": "gda.storage.views.lazy",
    "stack": "gda.storage.views.lazy",
    "concatenate": "gda.storage.views.lazy",
}

__all__ = [*_MODULE_OF]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    # Lazy, so that gda.Retry does not import JAX.
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    from gda.layout.text import near_name

    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{near_name(name, __all__)}")


def __dir__() -> list[str]:
    return list(__all__)
