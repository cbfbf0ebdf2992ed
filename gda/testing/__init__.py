"""Help with tests of code that works on sharded arrays.

- ``@pytest.mark.processes(4, devices=2)`` runs a test in that many real processes; the fixture
  ``process_pool`` calls functions in them: ``gda.testing.plugin``, which pytest finds by itself.
- ``Pool``, ``ProcessError``: such processes without pytest.
- ``strategies``: hypothesis strategies for meshes, specs, shapes and ``GlobalArray``s. This module
  needs hypothesis.

Read ``pool`` and ``worker`` first, which talk over a ``channel`` and get an ``answer``; then
``plugin``, ``marker``, ``pools``, ``session`` (the pytest in a process) and ``merge``.

Nothing is imported here until it is used: each module says what it needs, and which extra installs
that.

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
        return getattr(import_module("gda.testing.pool"), name)
    raise AttributeError(f"module 'gda.testing' has no attribute {name!r}")


def __dir__() -> list[str]:
    return list(__all__)
