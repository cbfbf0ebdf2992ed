"""The files of a run as Orbax writes them, without Orbax."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts


def write_orbax(path: Path, tree: dict[tuple[str | int, ...], Any]) -> None:
    """Write a run as Orbax does with ``use_ocdbt=False``."""
    entries: dict[str, Any] = {}
    for keys, value in tree.items():
        kind = "scalar" if isinstance(value, int) else "np.ndarray"
        named = [{"key": str(key), "key_type": 1 if isinstance(key, int) else 2} for key in keys]
        entries[str(tuple(map(str, keys)))] = {
            "key_metadata": named,
            "value_metadata": {"value_type": kind, "skip_deserialize": False},
        }
        file = {"driver": "file", "path": f"{path}/{'.'.join(map(str, keys))}/"}
        data = np.asarray(value)
        spec = {"driver": "zarr3", "kvstore": file, "create": True}
        ts.open(spec, dtype=data.dtype.name, shape=data.shape).result().write(data).result()
    metadata = {"tree_metadata": entries, "use_ocdbt": False, "use_zarr3": True}
    (path / "_METADATA").write_text(json.dumps(metadata))
