"""The settings of JAX under which gda computes, whatever the user has set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax

_NOT_GUARDED = (None, "allow")
_AS_THEY_ARE = nullcontext()


def own_settings() -> AbstractContextManager[None]:
    """Override the settings of the user, for this thread: the user asked for these transfers.

    The NaNs of the user's arrays are no faults of gda's programs.
    """
    config: Any = jax.config
    # To look takes a tenth of the time: in a tree of small arrays it is felt.
    if (
        config.jax_transfer_guard_host_to_device in _NOT_GUARDED
        and config.jax_transfer_guard_device_to_host in _NOT_GUARDED
        and config.jax_transfer_guard_device_to_device in _NOT_GUARDED
        and config.jax_numpy_rank_promotion == "allow"
        and not (config.jax_disable_jit or config.jax_debug_nans or config.jax_debug_infs)
    ):
        return _AS_THEY_ARE
    return _overriding()


@contextmanager
def _overriding() -> Iterator[None]:
    with (
        jax.disable_jit(False),
        jax.transfer_guard("allow"),
        jax.numpy_rank_promotion("allow"),
        jax.debug_nans(False),
        jax.debug_infs(False),
    ):
        yield
