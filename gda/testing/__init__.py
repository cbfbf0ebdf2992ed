"""Help with tests of code that works on sharded arrays.

Provisional: see ``docs/stable.md``.

- ``@pytest.mark.processes(4, devices=2)`` runs a test in 4 real processes, and the fixture
  ``process_pool`` calls functions in them. pytest finds their ``gda.testing.plugin`` by itself.
- ``Pool``, ``ProcessError``: such processes without pytest.
- ``strategies``: hypothesis strategies for meshes, specs, shapes and ``GlobalArray``s. They
  need hypothesis.

Read ``pool`` and ``worker`` first, with ``channel`` between them, ``forking`` below and ``answer``;
then ``plugin``, ``marker``, ``pools``, ``session`` (the pytest in a process) and ``merge``.

Modules are imported on first use.

>>> import gda
>>> from hypothesis import find
>>> find(gda.testing.strategies.mesh_shapes(), lambda shape: len(shape) == 2)
{'x': 1, 'y': 1}
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gda.testing import strategies as strategies
    from gda.testing.answer import ProcessError
    from gda.testing.pool import Pool

__all__ = ["Pool", "ProcessError", "strategies"]


def __getattr__(name: str) -> Any:
    if name == "strategies":
        return import_module("gda.testing.strategies")
    if name in __all__:
        module = "gda.testing.pool" if name == "Pool" else "gda.testing.answer"
        return getattr(import_module(module), name)
    raise AttributeError(f"module 'gda.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
