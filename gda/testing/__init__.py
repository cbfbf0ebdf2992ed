"""Help with tests of code that works on sharded arrays.

- ``@pytest.mark.processes(4, devices=2)`` runs a test in that many real processes; the fixture
  ``process_pool`` calls functions in them: ``gda.testing.plugin``, which pytest finds by itself.
- ``Pool``, ``ProcessError``: such processes without pytest.
- ``gda.testing.strategies``: hypothesis strategies for meshes, specs, shapes and ``GlobalArray``s.

Read ``pool`` and ``worker`` first, which talk over a ``channel`` and get an ``answer``; then
``plugin``, ``marker``, ``pools``, ``session`` (the pytest in a process) and ``merge``.

Nothing is imported here until it is used: each module says what it needs, and which extra installs
that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gda.testing.answer import ProcessError
    from gda.testing.pool import Pool

__all__ = ["Pool", "ProcessError"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gda.testing' has no attribute {name!r}")
    from gda.testing import pool

    return getattr(pool, name)
