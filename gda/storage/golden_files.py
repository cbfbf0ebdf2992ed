"""Golden files: documents in JSON that a test compares with its results, and writes on demand."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gda.layout.strict_json import parse_json

_VERSION = 1
UPDATE = "GDA_UPDATE_GOLDEN"


def check_golden(
    name: str,
    found: dict[str, Any],
    path: Path,
    differences: Callable[[Any, Any], Iterable[str]],
) -> None:
    """Compare a document with a golden file, or write the file if ``GDA_UPDATE_GOLDEN`` is 1.

    Args:
      name: the thing that the document describes, for messages.
      found: the document, without a version.
      path: the golden file.
      differences: returns a line for each difference of the document in the file and ``found``.

    Raises:
      AssertionError: there are differences; the message has their lines.
      FileNotFoundError, ValueError: there is no such file, or it is not a golden file.
    """
    found = {"version": _VERSION, **found}
    if os.environ.get(UPDATE) == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found, indent=1) + "\n")
        return
    try:
        golden = parse_json(path.read_text())
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno,
            "there is no golden file; write it with pytest --gda-update-golden",
            str(path),
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not a golden file: {error}") from None
    if not isinstance(golden, dict) or golden.get("version") != _VERSION:
        raise ValueError(f'{path} is not a golden file: it has no "version": {_VERSION}')
    try:
        lines = [*differences(golden, found)]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not a golden file of this version of gda: {error!r}; write it again with "
            "pytest --gda-update-golden"
        ) from None
    if lines:
        raise AssertionError(
            "\n".join(
                [
                    f"{name} differs from {path}:",
                    *(f"  {line}" for line in lines),
                    "if this is intended, write the file again with pytest --gda-update-golden",
                ]
            )
        )
