"""Handlers of signals end with the test of a run that installed them."""

from collections.abc import Iterator

import pytest

from gda.multihost import ending


@pytest.fixture(autouse=True)
def handlers_of_one_test() -> Iterator[None]:
    """Restore the handlers of signals that a run without its ``close`` keeps."""
    yield
    for handler in [*ending._handlers.values()]:
        for queue in handler.queues:
            handler.leave(queue)
