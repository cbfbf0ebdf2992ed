"""The settings of JAX under which gda computes, whatever the user has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Override the settings of the user, for this thread: the user asked for these transfers.

    The NaNs of the user's arrays are no faults of gda's programs.
    """
    with (
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.numpy_rank_promotion("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield
