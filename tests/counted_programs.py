"""Eight programs on four devices: their operations, memory traffic and communication by hand.

As a program it writes the table of ``docs/step-times.md``. All figures are of one device. Shapes
cost a compiler nothing, so they are large: little fits into the memory on a chip.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from page_blocks import table

import gda
from gda.compiled.hlo import format_size

DEVICES = 4
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "h100": "h100:4"}


class Counted(NamedTuple):
    """A program, and its figures of one device by hand.

    Attributes:
      fun, args: the function, and its arguments on a mesh with the axis ``x``.
      flops: operations of the products.
      arrays: bytes that products read and write, each array once; what collectives read and write
        of memory is in their own time.
      sent: bytes that a device sends, if a ring does each collective.
    """

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    flops: int
    arrays: int
    sent: int = 0


def _shaped(mesh: Mesh, shape: tuple[int, ...], *spec: Any, dtype: Any = jnp.bfloat16) -> Any:
    return gda.abstract(jax.ShapeDtypeStruct(shape, dtype), mesh, P(*spec))


def _on(mesh: Mesh, x: jax.Array, *spec: Any) -> jax.Array:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def dense(mesh: Mesh, rows: int = 65_536, width: int = 8192, inner: int = 32_768) -> Counted:
    """Two products of a batch that is sharded, with parameters that are not."""

    def fun(x: Any, up: Any, down: Any) -> Any:
        return jax.nn.relu(x @ up) @ down

    args = (
        _shaped(mesh, (rows, width), "x"),
        _shaped(mesh, (width, inner)),
        _shaped(mesh, (inner, width)),
    )
    own = rows // DEVICES
    arrays = 2 * (2 * own * width + 2 * own * inner + 2 * width * inner)
    return Counted(fun, args, 2 * 2 * own * width * inner, arrays)


def fsdp(
    mesh: Mesh, layers: int = 16, rows: int = 65_536, width: int = 4096, inner: int = 16_384
) -> Counted:
    """Scanned layers whose parameters are sharded, and gathered before use."""

    def fun(x: Any, params: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            up, down = (_on(mesh, each) for each in w)
            return _on(mesh, jax.nn.relu(x @ up) @ down, "x"), None

        return lax.scan(layer, x, params)[0]

    params = (
        _shaped(mesh, (layers, width, inner), None, "x"),
        _shaped(mesh, (layers, inner, width), None, "x"),
    )
    own, of_layer = rows // DEVICES, 2 * 2 * width * inner
    sent = of_layer * (DEVICES - 1) // DEVICES
    # A shard is taken out of the stack, and then gathered.
    arrays = 2 * (2 * own * width + 2 * own * inner) + 2 * of_layer // DEVICES + of_layer
    return Counted(
        fun,
        (_shaped(mesh, (rows, width), "x"), params),
        layers * 2 * 2 * own * width * inner,
        layers * arrays,
        layers * sent,
    )


def tensor_parallel(
    mesh: Mesh, rows: int = 16_384, width: int = 8192, inner: int = 65_536
) -> Counted:
    """Two products whose inner dimension is sharded, and the sum of their parts."""

    def fun(x: Any, up: Any, down: Any) -> Any:
        return _on(mesh, jax.nn.relu(x @ up) @ down)

    args = (
        _shaped(mesh, (rows, width)),
        _shaped(mesh, (width, inner), None, "x"),
        _shaped(mesh, (inner, width), "x"),
    )
    own, result = inner // DEVICES, 2 * rows * width
    arrays = 2 * (rows * width + 2 * rows * own + 2 * width * own) + result
    sent = 2 * (DEVICES - 1) * result // DEVICES
    return Counted(fun, args, 2 * 2 * rows * width * own, arrays, sent)


def experts(mesh: Mesh, places: int = 16_384, width: int = 4096, inner: int = 16_384) -> Counted:
    """An expert on each device: rows go to theirs and come back."""

    def on_each(x: Any, up: Any, down: Any) -> Any:
        x = lax.all_to_all(x, "x", 0, 0, tiled=True)
        y = jax.nn.relu(x @ up[0]) @ down[0]
        return lax.all_to_all(y, "x", 0, 0, tiled=True)

    specs = (P("x"), P("x"), P("x"))
    fun = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=P("x"))
    args = (
        _shaped(mesh, (DEVICES * places, width), "x"),
        _shaped(mesh, (DEVICES, width, inner), "x"),
        _shaped(mesh, (DEVICES, inner, width), "x"),
    )
    rows = 2 * places * width
    arrays = 2 * rows + 2 * (2 * places * inner + 2 * width * inner)
    sent = 2 * rows * (DEVICES - 1) // DEVICES
    return Counted(fun, args, 2 * 2 * places * width * inner, arrays, sent)


def ring(mesh: Mesh, tokens: int = 32_768, heads: int = 16, size: int = 128) -> Counted:
    """Attention without a softmax: keys and values go around, and meet the queries of each."""
    turns = [(at, (at + 1) % DEVICES) for at in range(DEVICES)]

    def on_each(query: Any, key: Any, value: Any) -> Any:
        def mixed(key: Any, value: Any) -> Any:
            scores = jax.nn.relu(jnp.einsum("hqd,hkd->hqk", query, key))
            return jnp.einsum("hqk,hkd->hqd", scores, value)

        def turn(carry: Any, _: None) -> Any:
            key, value, total = carry
            key, value = (lax.ppermute(each, "x", turns) for each in (key, value))
            return (key, value, total + mixed(key, value)), None

        carry = (key, value, mixed(key, value))
        return lax.scan(turn, carry, length=DEVICES - 1)[0][2]

    specs = P(None, "x")
    fun = jax.shard_map(on_each, mesh=mesh, in_specs=(specs,) * 3, out_specs=specs)
    own = tokens // DEVICES
    block, scores = 2 * heads * own * size, 2 * heads * own * own
    if mesh.devices.flat[0].platform == "tpu":
        scores = 0  # the compiler fuses both products, and a tile of the scores stays on the chip
    # The queries, keys and values are read, the scores written and read, the product added.
    first, turn = 3 * block + 2 * scores + block, 3 * block + 2 * scores + 2 * block
    return Counted(
        fun,
        (_shaped(mesh, (heads, tokens, size), None, "x"),) * 3,
        DEVICES * 2 * 2 * heads * own * own * size,
        first + (DEVICES - 1) * turn,
        (DEVICES - 1) * 2 * block,
    )


def decode(
    mesh: Mesh,
    layers: int = 16,
    width: int = 8192,
    inner: int = 32_768,
    sequences: int = 16,
    tokens: int = 16_384,
) -> Counted:
    """A token of some sequences: a cache of keys and values that 8 queries share, and an MLP."""
    groups, shared, size = 8, 8, width // 64

    def fun(x: Any, params: Any, cache: Any) -> Any:
        def layer(x: Any, each: Any) -> Any:
            (up, down), (keys, values) = each
            query = x.reshape(sequences, groups, shared, size)
            scores = jax.nn.softmax(jnp.einsum("bgqd,bgtd->bgqt", query, keys))
            x = x + jnp.einsum("bgqt,bgtd->bgqd", scores, values).reshape(x.shape)
            rows = _on(mesh, x)
            return _on(mesh, x + jax.nn.relu(rows @ up) @ down, None, "x"), None

        return lax.scan(layer, x, (params, cache))[0]

    params = (
        _shaped(mesh, (layers, width, inner), None, None, "x"),
        _shaped(mesh, (layers, inner, width), None, "x"),
    )
    cache = (_shaped(mesh, (layers, sequences, groups, tokens, size), None, None, "x"),) * 2
    own, held = inner // DEVICES, sequences * groups // DEVICES * tokens * size
    row = 2 * sequences * width
    # The compiler for GPUs copies the part of each layer out of the stack.
    times = 3 if mesh.devices.flat[0].platform == "gpu" else 1
    # The heads of each device are gathered, and the parts of the MLP are summed and scattered.
    return Counted(
        fun,
        (_shaped(mesh, (sequences, width), None, "x"), params, cache),
        layers * 2 * 2 * (sequences * width * own + shared * held),
        times * layers * 2 * (2 * width * own + 2 * held),
        layers * 2 * row * (DEVICES - 1) // DEVICES,
    )


def float8(mesh: Mesh, rows: int = 65_536, width: int = 16_384) -> Counted:
    """A product of numbers of 8 bits, with a result of 16."""

    def fun(x: Any, w: Any) -> Any:
        return lax.dot(x, w, preferred_element_type=jnp.bfloat16)

    dtype = jnp.float8_e4m3fn
    args = (
        _shaped(mesh, (rows, width), "x", dtype=dtype),
        _shaped(mesh, (width, width), dtype=dtype),
    )
    own = rows // DEVICES
    return Counted(fun, args, 2 * own * width**2, own * width + width**2 + 2 * own * width)


def convolution(mesh: Mesh, images: int = 1024, side: int = 56, channels: int = 512) -> Counted:
    """A convolution of 3 x 3; taps outside an image are no operations."""

    def fun(x: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    args = (
        _shaped(mesh, (images, side, side, channels), "x"),
        _shaped(mesh, (3, 3, channels, channels)),
    )
    own = images // DEVICES
    arrays = 2 * (2 * own * side**2 * channels + 9 * channels**2)
    return Counted(fun, args, 2 * own * (3 * side - 2) ** 2 * channels**2, arrays)


PROGRAMS: dict[str, Callable[[Mesh], Counted]] = {
    "dense": dense,
    "FSDP, scanned": fsdp,
    "tensor-parallel": tensor_parallel,
    "experts": experts,
    "ring": ring,
    "decode": decode,
    "float8": float8,
    "convolution": convolution,
}


# The figures of a rehearsal.


def mesh_of(kind: str) -> Mesh:
    return gda.rehearsal_mesh(TOPOLOGIES[kind], {"x": DEVICES})


def memory_of(found: gda.Rehearsal) -> int:
    """Return the bytes that kernels read and write."""
    return sum(each.nbytes for each in found.seconds.places)


def sent_by(found: gda.Rehearsal) -> int:
    """Return the bytes that a device sends, if a ring of all devices does each collective."""
    assert found.collectives is not None
    total = 0
    for each in found.collectives:
        assert each.count is not None
        whole = each.nbytes_output if each.kind == "all-gather" else each.nbytes
        part = {"all-reduce": 2 * (DEVICES - 1), "collective-permute": DEVICES}
        total += each.count * whole * part.get(each.kind, DEVICES - 1) // DEVICES
    return total


# The page.

PAGE = Path(__file__).parents[1] / "docs" / "step-times.md"
TABLE = re.compile(r"(?<=<!-- counted -->\n).*(?=<!-- end of counted -->)", re.DOTALL)


def rows() -> Iterator[list[str]]:
    """Yield a row for each program: by hand, and what the rehearsals have of it."""
    for name, program in PROGRAMS.items():
        by_hand = [program(mesh_of(kind)) for kind in TOPOLOGIES]
        found = [gda.rehearse(each.fun, *each.args) for each in by_hand]
        arrays = dict.fromkeys(format_size(each.arrays) for each in by_hand)
        cells = [
            f"{(each.flops or 0) / hand.flops:.4g}, {memory_of(each) / hand.arrays:.2f}, "
            + (f"{sent_by(each) / hand.sent:.4g}" if hand.sent else "none")
            for each, hand in zip(found, by_hand, strict=True)
        ]
        first = by_hand[0]
        yield [name, f"{first.flops:.4g}", ", ".join(arrays), format_size(first.sent), *cells]
        print(name, *cells, flush=True)


def main() -> None:
    head = ["program", "operations", "memory", "sent", *map("`{}`".format, TOPOLOGIES)]
    text = table(head, rows())
    PAGE.write_text(TABLE.sub(lambda _: text, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
