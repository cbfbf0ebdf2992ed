"""The ways that do less than the work beside which they are measured, and what each leaves out.

They show how much is left to gain, and are no rivals. A way that gives the answer that gda gives is
a rival, however few lines it has.
"""

LESS = {
    "raw read into fresh memory": "no array, no checksum",
    "raw read with CRC-32C, into aligned memory": "no array",
    "bare read into memory that JAX adopts": "the arrays do not have the layout",
    "raw read, and make_array_from_callback of aligned memory": (
        "the arrays do not hold the bytes that were read; no checksum"
    ),
    "raw write and fsync": "nothing says which array the bytes are; no checksum",
    "raw write and fsync, 8 threads": "as raw write and fsync",
    "raw write past the page cache (O_DIRECT)": "as raw write and fsync",
    "raw write and fsync, a file for each process": "as raw write and fsync",
    "the same reads, each written and synced, 4 threads": "as raw write and fsync",
    "one copy of the blocks to the host": "nothing is saved",
    "views of the blocks by NumPy": "nothing is saved",
    "TensorStore, each chunk decoded once into warm memory": "no array",
    "json.loads of both manifests": "nothing is compared",
    "devices_indices_map of a new NamedSharding, no replica ids": "no replica ids",
    "op_sharding_to_indices over an AbstractMesh (private), no replica ids": "no replica ids",
    "8 tuples of slices made in a loop of plain Python": "the formula of one mesh and spec",
    "64 objects with slices made in a loop of plain Python": "the formula of one mesh and spec",
    "s.data of addressable_shards, no index, no replica id": "no index, no replica id",
    "the step alone": "no batch",
    "their paths and bytes in JAX": "no layout, no bytes per device",
    "their bytes in JAX": "no layout, no bytes per device",
    "python -c 'import jax', what any answer with JAX costs": "no answer",
    "python -c 'import numpy'": "no answer",
    "import jax": "gda is not imported",
    "a shape that divides": "gda itself: no block is padded",
    "GlobalArray": "gda itself: no padding",
    "dataclasses with an array each, registered with JAX": "no methods of an array, no layout",
    **{
        f"{share} of them": "gda itself: so many times less to do"
        for share in ("a tenth", "an eighth", "a sixteenth")
    },
    "the same collectives alone": "no array: the buffers are filled before",
    "loopback between processes and memory within": "bytes, but no array",
    "plain sockets between as many processes": "bytes, but no array and no checksum",
}


def is_less(way: str) -> bool:
    """Return whether a way does less than the work beside which it was measured."""
    return way in LESS
