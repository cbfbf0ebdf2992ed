"""Former names of attributes and of keys, kept for one version."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any


class FormerName:
    """The former name of an attribute: it gives the same value, with a ``DeprecationWarning``.

    Args:
      name: the name of today.

    >>> import warnings
    >>> class Plan:
    ...     nbytes_kept = 8
    ...     bytes_kept = FormerName("nbytes_kept")
    >>> with warnings.catch_warnings(record=True) as caught:
    ...     warnings.simplefilter("always")
    ...     print(Plan().bytes_kept, caught[0].message)
    8 Plan.bytes_kept is deprecated, and gda 0.2 removes it; use Plan.nbytes_kept
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.former = name

    def __get__(self, instance: object, owner: type) -> Any:
        if instance is None:
            return self
        kind = owner.__name__
        warnings.warn(
            f"{kind}.{self.former} is deprecated, and gda 0.2 removes it; use {kind}.{self.name}",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(instance, self.name)


def with_former_keys(document: dict[str, Any], former: Mapping[str, str]) -> dict[str, Any]:
    """Return a document for JSON with its values under their former keys too.

    Args:
      former: the former key by the key of today.

    >>> with_former_keys({'nbytes_total': 8}, {'nbytes_total': 'total_bytes'})
    {'nbytes_total': 8, 'total_bytes': 8}
    """
    return {**document, **{old: document[new] for new, old in former.items()}}
