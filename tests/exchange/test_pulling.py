"""Pulls of every kind of leaf onto other layouts, and the updates of an offer, in one process."""

import atexit
import contextlib
import errno
import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from leaks import no_thread_is_left  # noqa: F401, of every test
from meshes import batch, cut, mesh_of

import gda
from gda.arrays.transport.connection import Address, Connection, Deadline
from gda.exchange import offering
from gda.exchange.asking import OfferToPull
from gda.exchange.catalog import catalog_of
from gda.testing.strategies import meshes, partition_specs


def first_on_x(path: str, leaf: Any) -> P:
    return P("x") if leaf.ndim else P()


def tree_of(mesh: Mesh) -> Any:
    kinds = ["bool", "int4", "bfloat16", "float8_e4m3fn", "complex64"]
    return {
        "rows": cut(batch(8, 6), mesh, P("x")),
        "both": cut(batch(8, 6), mesh, P("y", None)).array,
        "padded": gda.PaddedArray.from_source(batch(7, 3), mesh, P("x")),
        "keys": jax.random.wrap_key_data(np.arange(16, dtype=np.uint32).reshape(8, 2)),
        "one key": gda.GlobalArray.from_array(
            jax.device_put(jax.random.key(4), NamedSharding(mesh, P()))
        ),
        "numpy": batch(5, 2),
        "scalar": jax.device_put(np.float32(2.5)),
        "number": np.int64(7),
        "empty": cut(batch(8, 0), mesh, P("x")),
        "kinds": [jax.device_put(batch(8).astype(jnp.dtype(kind))) for kind in kinds],
        "nested": ({"step": 3, "name": "run", "rate": 0.5, "none": None}, [True, b"bytes"]),
    }


def assert_equal(pulled: Any, offered: Any) -> None:
    def data_of(leaf: Any) -> Any:
        if isinstance(leaf, gda.PaddedArray):
            return leaf.gather()
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.key_data(leaf)
        return leaf

    is_padded = lambda leaf: isinstance(leaf, gda.PaddedArray)  # noqa: E731
    trees = [jax.tree.map(data_of, tree, is_leaf=is_padded) for tree in (pulled, offered)]
    for one, other in zip(*[jax.tree.leaves(gda.to_numpy(tree)) for tree in trees], strict=True):
        np.testing.assert_array_equal(one, other, strict=True)


@pytest.fixture
def offer(mesh: Mesh) -> Iterator[gda.Offer]:
    with gda.offer(tree_of(mesh), name="run") as offer:
        yield offer


def test_every_kind_of_leaf_arrives(offer: gda.Offer, mesh: Mesh) -> None:
    tree, given = gda.pull(offer.address, mesh, first_on_x, pad=True), tree_of(mesh)
    assert_equal(tree, given)
    assert tree["both"].spec == P("x")
    assert isinstance(tree["rows"], gda.GlobalArray)
    assert isinstance(tree["padded"], gda.PaddedArray)
    assert tree["nested"] == given["nested"]
    like = given | {"rows": jax.ShapeDtypeStruct((8, 6), "f4", sharding=given["both"].sharding)}
    tree = gda.pull(offer.address, like=like)
    assert_equal(tree, given)
    assert jax.tree.structure(tree) == jax.tree.structure(like)
    assert tree["rows"].sharding == given["both"].sharding
    assert isinstance(tree["numpy"], np.ndarray)


def test_parts_of_a_tree_and_arrays_without_a_layout(offer: gda.Offer, mesh: Mesh) -> None:
    tree = gda.pull(offer.address, name="run")
    assert isinstance(tree["rows"], np.ndarray)
    np.testing.assert_array_equal(tree["padded"], batch(7, 3))
    assert gda.pull(offer.address, at=["nested", 0])["step"] == 3
    kinds = gda.pull(offer.address, mesh, P("x"), at=["kinds"], plain=True)
    assert all(isinstance(kind, jax.Array) for kind in kinds)
    assert_equal(kinds, tree_of(mesh)["kinds"])


@given(
    layouts=st.tuples(*2 * [meshes().flatmap(lambda m: st.tuples(st.just(m), partition_specs(m)))]),
    sizes=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    dtype=st.sampled_from(["float32", "int4", "bool"]),
)
def test_any_layout_becomes_any_other(layouts: Any, sizes: list[int], dtype: str) -> None:
    whole = (batch(*sizes) % 7).astype(jnp.dtype(dtype))
    (source, before), (target, after) = layouts
    offered = gda.PaddedArray.from_source(whole, source, before)
    with gda.offer([offered]) as offer:
        (pulled,) = gda.pull(offer.address, target, [after], pad=True)
    np.testing.assert_array_equal(np.asarray(pulled), whole)
    assert dict(pulled.mesh.shape) == dict(target.shape)


# Versions.


donated = jax.jit(lambda x: x + 1, donate_argnums=0)


def test_offered_arrays_may_be_donated_and_written_to(mesh: Mesh) -> None:
    array, data = cut(batch(8, 6), mesh, P("x")).array, batch(4)
    with gda.offer({"w": array, "data": data}) as offer:
        after = jax.block_until_ready(donated(array))
        data[:] = -1
        pulled = gda.pull(offer.address)
        np.testing.assert_array_equal(pulled["w"], batch(8, 6))
        np.testing.assert_array_equal(pulled["data"], batch(4))
        offer.update({"w": after, "data": data})
        np.testing.assert_array_equal(gda.pull(offer.address)["w"], batch(8, 6) + 1)


def test_a_pull_that_has_begun_gets_its_version_and_the_memory_is_free_afterwards() -> None:
    with gda.offer({"w": batch(8, 6)}) as offer:
        connection = connected_to(offer)
        connection.send({"ask": "tree", "name": None, "least": 1, "timeout": 60})
        catalog = catalog_of(connection.text(2**20), "offer", Deadline(60))
        offer.update({"w": batch(8, 6) + 1})
        held = weakref.ref(offer._versions._held[1][0])
        assert offer.version == 2
        np.testing.assert_array_equal(first_rows(offer, catalog.version, (8, 6)), batch(2, 6))
        np.testing.assert_array_equal(gda.pull(offer.address)["w"], batch(8, 6) + 1)
        connection.close()
        deadline = Deadline(60)
        while offer._versions._pulls.total() and deadline.left():
            pass
        offer.update({"w": batch(8, 6) + 2})
        assert_free(held)
        assert [*offer._versions._held] == [3]
        with pytest.raises(ValueError, match="has no version 1 any more; pull again"):
            first_rows(offer, 1, (8, 6))


def assert_free(held: weakref.ref) -> None:
    deadline = Deadline(60)
    while held() is not None and deadline.left():
        gc.collect()
    assert held() is None


def connected_to(offer: gda.Offer) -> Connection:
    return Connection.to(Address.of(offer.address), "offer", None, Deadline(60))


def first_rows(offer: gda.Offer, version: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return the first two rows of the first array of a version."""
    rows = np.empty((2, *shape[1:]), np.float32)
    with contextlib.closing(connected_to(offer)) as connection:
        question = {"ask": "pieces", "run": offer._versions.run, "version": version, "timeout": 60}
        connection.send(question | {"pieces": [[[0], [0] * rows.ndim, [*rows.shape], "float32"]]})
        answer = connection.message(2**20)
        if "error" in answer:
            raise ValueError(answer["error"][1])
        connection.receive_blocks([rows])
    return rows


def test_a_version_that_does_not_come_and_a_pull_of_a_run_that_is_over() -> None:
    with gda.offer({"step": 1}) as offer:
        offer.update({"step": 2})
        assert gda.pull(offer.address, min_version=2) == {"step": 2}
        with pytest.raises(TimeoutError, match="has version 2 and no later one"):
            gda.pull(offer.address, min_version=3, timeout=0.5)
        with pytest.raises(LookupError, match="was started again; pull again"):
            offer._versions.get("another run", 1, Deadline(60))


def test_silent_pullers_hold_few_versions() -> None:
    with gda.offer({"w": batch(4)}) as offer, contextlib.ExitStack() as silent:
        for number in range(1, 13):
            catalogs = OfferToPull(Address.of(offer.address), None, Deadline(60))
            catalogs.catalog(None, 1, silent)
            offer.update({"w": batch(4) + number})
        assert [*offer._versions._held] == [*range(5, 14)]
        with pytest.raises(ValueError, match="has no version 4 any more; pull again"):
            first_rows(offer, 4, (4,))


def test_pullers_that_take_nothing_do_not_hold_what_was_let_go() -> None:
    """More than sockets hold, so that the offer is in the middle of sending it."""
    whole = np.zeros((2048, 2048), np.float32)
    question = {"ask": "pieces", "version": 1, "timeout": 3600}
    with gda.offer({"w": whole}) as offer:
        (block,) = offer._versions._held[1][0]._data[0].values()
        held = weakref.ref(block)
        with contextlib.closing(connected_to(offer)) as connection:
            pieces = [[[0], [0, 0], [2048, 2048], "float32"]]
            connection.send(question | {"run": offer._versions.run, "pieces": pieces})
            assert connection.message(2**10) == {"nbytes": whole.nbytes}
            del block
            offer.update({"w": whole})
            assert_free(held)


def test_an_interrupted_update_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decisions = []

    def interrupted(work: Any, *, share: Any, decide: Any, **options: Any) -> None:
        """As if processes met in a thread that goes on when the update was interrupted."""
        told = share(work())
        decisions.append(lambda: decide({0: told}))
        raise KeyboardInterrupt

    with gda.offer({"step": 1}) as offer:
        with monkeypatch.context() as patch:
            patch.setattr(offering, "all_do", interrupted)
            with pytest.raises(KeyboardInterrupt):
                offer.update({"step": 2})
        assert decisions[0]() == [2]
        assert offer.version == 1
        assert gda.pull(offer.address, timeout=60) == {"step": 1}
        offer.update({"step": 3})
        assert gda.pull(offer.address, min_version=2) == {"step": 3}


def test_an_update_may_have_other_layouts_and_leaves(mesh: Mesh) -> None:
    """The step count of an optimizer is on one device before the first jitted step."""
    rows, columns = (cut(batch(8, 6), mesh, P(*spec)) for spec in (["x"], [None, "y"]))
    count, after = jax.device_put(0), jax.device_put(np.int32(1), NamedSharding(mesh, P()))
    with gda.offer({"w": rows, "count": count}) as offer:
        offer.update({"w": columns, "count": after})
        tree = gda.pull(offer.address, mesh, first_on_x)
        offer.update([columns, batch(3)])
        _, grown = gda.pull(offer.address)
    np.testing.assert_array_equal(tree["w"].gather(), batch(8, 6))
    assert int(tree["count"].array) == 1
    np.testing.assert_array_equal(grown, batch(3))


def test_a_closed_offer_is_not_there_and_a_pull_waits_for_a_later_one() -> None:
    offer = gda.offer({"w": batch(4)})
    offer.close()
    with pytest.raises(ConnectionError, match="is not there: Connection refused for 0.5 s"):
        gda.pull(offer.address, timeout=0.5)
    with pytest.raises(ConnectionError, match="the offer 'tree' is closed; make another"):
        offer.update({"w": batch(4)})
    with ThreadPoolExecutor(1) as thread:
        pulling = thread.submit(gda.pull, offer.address, timeout=60)
        threading.Event().wait(0.5)
        with gda.offer({"step": 3}, offer.address):
            assert pulling.result() == {"step": 3}


@pytest.mark.filterwarnings("ignore:.*fork")  # of JAX and of Python: the child does little
def test_a_forked_process_has_no_port_of_the_offer_and_ends_its_own_before_other_handlers() -> None:
    """JAX's own waits at exit for other processes; until then no puller may get old weights."""
    read, write = os.pipe()
    with gda.offer({"step": 1}) as offer, open(read, "rb") as said:
        connection = connected_to(offer)
        child = os.fork()
        if not child:
            try:
                offer.close()
                atexit._clear()  # the handlers of this session

                @atexit.register
                def waits_for_others() -> None:
                    found = socket.socket().connect_ex(Address.of(own.address))
                    os.write(write, b"closed %3d" % found)

                own = gda.offer({"step": 2})
                atexit._run_exitfuncs()
                signal.pause()
            finally:
                os._exit(1)
        os.close(write)
        try:
            assert said.read(10) == b"closed %3d" % errno.ECONNREFUSED
            assert gda.pull(offer.address) == {"step": 1}
            offer.close()
            with contextlib.closing(connection), pytest.raises(ConnectionError):
                connection.message(2**10)
            gda.offer({"step": 2}, offer.address).close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


# Mistakes.


@pytest.mark.parametrize("address", ["localhost", 7700])
def test_addresses_that_are_none(address: Any) -> None:
    for call in (lambda: gda.pull(address), lambda: gda.offer({}, address)):
        with pytest.raises(ValueError, match="must be a text host:port"):
            call()


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"like": {"w": np.zeros(3, np.float32)}}, ValueError, "the offer does not match like"),
        ({"like": {"w": batch(4, 2).astype("f2")}}, ValueError, "like has float16; pass dtype="),
        ({"specs": P("z")}, ValueError, "the offer does not fit specs"),
        ({"timeout": 0}, ValueError, "timeout must be"),
        ({"min_version": 0}, ValueError, "min_version must be a whole number"),
        ({"name": "policy"}, LookupError, "offers 'tree', and not 'policy'"),
        ({"token": b"secret"}, TypeError, "token must be a text, not bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_pulls_that_do_not_fit(options: Any, kind: type[Exception], message: str) -> None:
    mesh = mesh_of({"x": 4})
    with gda.offer({"w": batch(4, 2)}) as offer, pytest.raises(kind, match=message):
        gda.pull(offer.address, **({"mesh": mesh} if "specs" in options else {}), **options)


def test_offers_that_cannot_be_made(tmp_path: Any) -> None:
    np.save(tmp_path / "w.npy", batch(4))
    source: Any = {"w": np.load(tmp_path / "w.npy", mmap_mode="r")}
    with gda.offer({}) as offer:
        rows: list[tuple[Any, Any, type[Exception], str]] = [
            (source, {}, TypeError, "a source cannot be offered; load it"),
            ({"w": gda.checkpoint.PerProcess(3)}, {}, TypeError, "a PerProcess cannot be offered"),
            ({}, {"token": ""}, ValueError, "token is empty"),
            ({}, {"token": b"secret"}, TypeError, "token must be a text, not bytes"),
            ({}, {"address": "0.0.0.0:0"}, ValueError, "is every address of this machine"),
            ({}, {"address": offer.address}, OSError, "cannot listen on 127.0.0.1"),
            ({}, {"address": "[fe80::1%none]:7700"}, OSError, "cannot listen on .fe80::1%none.:77"),
        ]
        for tree, options, kind, message in rows:
            with pytest.raises(kind, match=message) as error:
                gda.offer(tree, **options)
            assert not tree or error.value.__notes__ == ["gda: at w of the tree"]


EVERY = ["0.0.0.0:0", "0:0", "0x0:0", "[::]:0", "[::ffff:0.0.0.0]:0", "[::ffff:0:0]:0"]


def test_every_address_of_the_machine_is_none_to_offer_at() -> None:
    for address in EVERY:
        with pytest.raises(ValueError, match="is every address of this machine; pass the one"):
            gda.offer({}, address)


def test_memory_of_an_accelerator_is_read_once(monkeypatch: Any, mesh: Mesh) -> None:
    """Pinned memory of the host stands for it; the CPU has that kind too."""
    from gda.arrays.transport import to_host

    monkeypatch.setattr(to_host, "is_on_accelerator", lambda data: True)
    monkeypatch.setattr("gda.trees.written_blocks.is_host", lambda device: False)
    with gda.offer({"w": cut(batch(8, 6), mesh, P("x"))}) as offer:
        blocks = offer._versions._held[1][0]._data[0]
        assert {type(block).__module__ for block in blocks.values()} != {"numpy"}
        for _ in range(2):
            np.testing.assert_array_equal(gda.pull(offer.address)["w"], batch(8, 6))
        assert all(isinstance(block, np.ndarray) for block in blocks.values())
