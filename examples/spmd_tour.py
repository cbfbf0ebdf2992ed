"""The classic introduction to SPMD in JAX, with GlobalArrays, on 3 virtual CPU devices.

    python examples/spmd_tour.py

Each cell asserts the facts of the text above it.
"""

# In a notebook, the last expression of a cell is drawn.
# ruff: noqa: B018
# pyright: reportUnusedExpression=false
# JAX takes any object with __jax_array__, but its types do not declare that.
# pyright: reportArgumentType=false

# %% [markdown]
# # One program, many devices
#
# JAX runs one program over many devices, and each device works on its own part of the data. This is
# called SPMD: single program, multiple data. The tour shows the ways to write such a program, and
# after each step a picture of the block on each device.
#
# Three devices are enough. JAX makes them out of one CPU, if a flag is set before it starts.

# %%
import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=3"
)

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import gda

assert jax.device_count() == 3
jax.devices()

# %% [markdown]
# ## An array on one device
#
# The sharding of an array is the place of its elements. By default, the whole array is on the first
# device. `gda.show` draws it.

# %%
data = np.arange(24, dtype=np.float32).reshape(3, 8)
whole = jnp.asarray(data)

assert whole.devices() == {jax.devices()[0]}
assert whole.sharding.shard_shape(whole.shape) == (3, 8)

gda.show(whole)

# %% [markdown]
# ## A sharded array
#
# A mesh arranges the devices along named axes: here one axis, `'x'`, of 3 devices. A
# `PartitionSpec` maps dimensions to axes of the mesh: `P('x')` shards the rows over `'x'` and does
# not shard the columns.
#
# `from_callback` asks for one block after the other, and each device gets its own block only. The
# whole array is never in one place.

# %%
mesh = jax.make_mesh((3,), ("x",))
asked_for = []


def read(index):
    asked_for.append(index)
    return data[index]


g = gda.GlobalArray.from_callback((3, 8), mesh, P("x"), read)

assert asked_for == [(slice(i, i + 1), slice(None)) for i in range(3)]
for i, shard in enumerate(g.local_shards):
    assert shard.device == jax.devices()[i]
    assert shard.data.shape == (1, 8)
    assert np.array_equal(shard.data, data[i : i + 1])

gda.show(g)

# %% [markdown]
# In a notebook, an array at the end of a cell is drawn too. No picture reads or moves the data.

# %%
g

# %% [markdown]
# `from_array` wraps an array that JAX has sharded: nothing is copied or moved.

# %%
sharded = jax.device_put(whole, NamedSharding(mesh, P("x")))
wrapped = gda.GlobalArray.from_array(sharded)

assert wrapped.array is sharded
assert wrapped.grid.indices() == g.grid.indices()

gda.show(wrapped)

# %% [markdown]
# A picture needs no array and no device: shape, mesh and spec are enough.

# %%
gda.show((3, 8), {"x": 3}, P("x"), dtype=np.float32)

# %% [markdown]
# ## Computing: the layout follows the data
#
# Computing on a `GlobalArray` gives an ordinary `jax.Array`. An elementwise function needs no
# data of other devices, so the result is sharded like the input.

# %%
y = 2 * jnp.sin(g) + 1

assert isinstance(y, jax.Array)
assert y.sharding.is_equivalent_to(g.sharding, y.ndim)
assert np.allclose(y, 2 * np.sin(data) + 1, atol=1e-6)

gda.show(y)

# %% [markdown]
# `sum(axis=0)` adds up rows, which are on different devices: these must communicate, and then every
# device has the whole result. It is replicated. `gda.jit` is `jax.jit` that returns `GlobalArray`s.

# %%
over_rows = gda.jit(lambda x: x.sum(axis=0))
column_sums = over_rows(g)

assert column_sums.shape == (8,)
assert column_sums.is_fully_replicated
assert np.array_equal(column_sums, data.sum(axis=0))
for shard in column_sums.local_shards:
    assert np.array_equal(shard.data, data.sum(axis=0))

gda.show(column_sums)

# %% [markdown]
# `sum(axis=1)` adds up each row, which is on one device. No device communicates, and each sum stays
# on its device: the result is sharded over `'x'`.

# %%
within_rows = gda.jit(lambda x: x.sum(axis=1))
row_sums = within_rows(g)

assert row_sums.shape == (3,)
assert not row_sums.is_fully_replicated
assert [shard.data.tolist() for shard in row_sums.local_shards] == [[28], [92], [156]]

gda.show(row_sums)

# %% [markdown]
# ## Inside `jit`: the layout of a result
#
# So far JAX chose the layout of results. A constraint inside `jit` sets it instead. Its form
# depends on the axes of the mesh. Over Auto axes the compiler chooses layouts, and
# `with_sharding_constraint` binds it. Here the 3 sums go to every device.

# %%
auto = jax.make_mesh((3,), ("x",), axis_types=(AxisType.Auto,))


@jax.jit
def sums_everywhere(x):
    return jax.lax.with_sharding_constraint(x.sum(axis=1), NamedSharding(auto, P()))


everywhere = sums_everywhere(gda.constrain(g, P("x"), mesh=auto).array)

assert everywhere.is_fully_replicated
assert [shard.data.tolist() for shard in everywhere.addressable_shards] == [[28, 92, 156]] * 3

gda.show(everywhere)

# %% [markdown]
# Over Explicit axes the layout is part of an array's type, which JAX finds while it traces, and
# `reshard` changes it. So there is a picture before the function runs, and another one after it.
# `jax.make_mesh` gives Explicit axes by default in newer versions of JAX, and Auto axes in older
# ones.

# %%
explicit = jax.make_mesh((3,), ("x",), axis_types=(AxisType.Explicit,))
specs = []


@jax.jit
def sums_everywhere_again(x):
    specs.append(jax.typeof(x).sharding.spec)
    sums = x.sum(axis=1)
    specs.append(jax.typeof(sums).sharding.spec)
    gda.show(sums.shape, jax.typeof(sums).sharding)
    return jax.sharding.reshard(sums, NamedSharding(explicit, P()))


everywhere = sums_everywhere_again(gda.constrain(g, P("x"), mesh=explicit).array)

assert specs == [P("x", None), P("x")]
assert everywhere.is_fully_replicated
assert everywhere.tolist() == [28, 92, 156]

gda.show(everywhere)

# %% [markdown]
# `gda.constrain` works over both kinds of axes. Outside `jit` it moves the data.

# %%
to_everyone = gda.jit(lambda x: gda.constrain(x.sum(axis=1), P()))
everywhere = to_everyone(g)

assert everywhere.is_fully_replicated
assert gda.constrain(row_sums, P()).is_fully_replicated
assert np.array_equal(everywhere, data.sum(axis=1))

gda.show(everywhere)

# %% [markdown]
# ## `shard_map`: the program of one device
#
# So far the function saw the whole array. Inside `jax.shard_map` it sees the block of one device:
# for 24 numbers, sharded over 3 devices, an array of shape (8,).

# %%
numbers = gda.GlobalArray.from_callback((24,), mesh, P("x"), lambda index: np.arange(24)[index])
shapes = []


def on_each_device(x):
    shapes.append(x.shape)
    return 2 * jnp.sin(x) + 1


z = gda.jit(jax.shard_map(on_each_device, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(numbers)

assert set(shapes) == {(8,)}
assert z.shape == (24,)
assert z.grid.indices() == numbers.grid.indices()
assert np.allclose(z, 2 * np.sin(np.arange(24)) + 1, atol=1e-6)

gda.show(z)

# %% [markdown]
# Here a device has its own numbers only, so `sum` adds up 8 of them: 28, 92 and 156. `psum` adds up
# the values of all devices of an axis, and gives each of them the total, 276.

# %%
partial_sums = gda.jit(
    jax.shard_map(lambda x: x.sum(keepdims=True), mesh=mesh, in_specs=P("x"), out_specs=P("x"))
)(numbers)
add_all = gda.jit(
    jax.shard_map(lambda x: jax.lax.psum(x.sum(), "x"), mesh=mesh, in_specs=P("x"), out_specs=P())
)
total = add_all(numbers)

assert np.asarray(partial_sums).tolist() == [28, 92, 156]
assert int(total) == 276 == sum(range(24))
assert [int(shard.data) for shard in total.local_shards] == [276] * 3

gda.show(partial_sums)
gda.show(total)

# %% [markdown]
# ## Communication
#
# `gda.collectives` compiles a function, does not run it, and lists the communication between the
# devices. Sums within rows need none. Sums over rows need an all-reduce of the 8 numbers of each
# device. `psum` is an all-reduce too, of one number. Sums that every device gets need an
# all-gather.

# %%
print(gda.collectives(within_rows, g))
print(gda.collectives(over_rows, g))
print(gda.collectives(add_all, numbers))
print(gda.collectives(to_everyone, g))

assert not gda.collectives(lambda x: 2 * jnp.sin(x) + 1, g)
assert not gda.collectives(within_rows, g)
(sums,) = gda.collectives(over_rows, g)
assert (sums.kind, sums.axes, sums.nbytes_total) == ("all-reduce", ("x",), 8 * 4)
(sums,) = gda.collectives(add_all, numbers)
assert (sums.kind, sums.axes, sums.nbytes_total) == ("all-reduce", ("x",), 4)
(sums,) = gda.collectives(to_everyone, g)
assert (sums.kind, sums.axes, sums.nbytes_total) == ("all-gather", ("x",), 4)

# %% [markdown]
# In your own tests, one line asserts this.

# %%
gda.assert_collectives(over_rows, g, allow={("all-reduce", "x"): 1})
