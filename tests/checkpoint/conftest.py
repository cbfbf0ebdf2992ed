"""The object store that several tests of checkpoints share."""

from collections.abc import Iterator

import pytest
from s3_server import ENVIRONMENT, Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch, Server() as server:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield server
