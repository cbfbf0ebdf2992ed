"""The metrics of a step: numbers that the device may still compute when the step is saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np


def begun_to_fetch(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics whose copies to the host have begun, without a wait for the device.

    Raises ``TypeError`` for what is no mapping of numbers by name.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "metrics must be a dict of numbers by name, such as {'loss': 0.5}, not "
            f"{metrics!r:.200}"
        )
    kept = dict(metrics)
    for name, value in kept.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a metric must be a text, not {name!r}")
        if isinstance(value, jax.Array):
            is_number = value.size == 1 and jax.numpy.isrealobj(value)
        else:
            is_number = np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf"
        if not is_number:
            raise TypeError(
                f"metric {name!r} must be a real number, or an array of one, not {value!r:.200}"
            )
        if isinstance(value, jax.Array):
            # A copy, because the next step may take the array itself, which is donated to it.
            kept[name] = jax.numpy.copy(value.addressable_data(0))
            kept[name].copy_to_host_async()
    return kept


def fetched(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as numbers; waits for the device."""
    return {name: float(np.asarray(value).reshape(())) for name, value in metrics.items()}
