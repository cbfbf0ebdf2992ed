"""The offer of a tree: each process serves the blocks it holds, the first one also the catalog."""

from __future__ import annotations

import contextlib
import hmac
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import jax

from gda.arrays.transport.connection import Address, Deadline, check_token
from gda.arrays.transport.listening import address_towards
from gda.exchange.catalog import Catalog, LayoutNumbers, OfferProcess
from gda.exchange.serving import HeldTree, OfferServer
from gda.exchange.versions import Versions
from gda.layout.boundary import public, set_module
from gda.multihost.agreement import check_same_call, communicates, timeout_of_checks
from gda.multihost.meeting import DisagreementError
from gda.multihost.places import machine
from gda.multihost.steps import all_do
from gda.storage.options import Options
from gda.trees.leaves import Tree
from gda.trees.records.recorded_tree import ValueLeaf, flatten, noting_path
from gda.trees.records.saved_leaves import (
    SavedLeaf,
    SavedPerProcess,
    check_same_values,
    given_leaves,
    kept,
    values_of,
    with_blocks,
)

_LOOPBACK = "127.0.0.1"
_UPDATE = "update of an offer"


@set_module("gda")
@communicates("gda.offer")
def offer(
    tree: Tree,
    address: str | None = None,
    *,
    name: str = "tree",
    token: str | None = None,
) -> Offer:
    """Offer a tree to other programs, which get it by ``gda.pull``, on any mesh, with any specs.

    Communicates: every process of the program must call it, with the same tree. Each process serves
    the blocks that its devices hold, in threads, so the program goes on at once. Values are not
    copied on CPU devices: a step to which an offered array is donated copies it instead. An
    accelerator copies its blocks to pinned memory of the host.

    Args:
      tree: as for ``gda.checkpoint.save``, without sources and ``PerProcess``.
      address: ``host:port`` that the first process listens on, and that pullers are given. With
        port 0 the system chooses one. Each other process listens on the address by which it reaches
        the first one, on a port that the system chooses. By default all listen on 127.0.0.1, which
        only programs on this machine reach.
      name: a puller may ask for the name that it expects.
      token: a secret that a puller must have. It is never sent, but the values are not encrypted:
        see ``docs/programs.md``.

    Returns:
      the offer. It ends with ``close``, as a context manager, or when the program begins to exit.

    Raises:
      TypeError: a leaf cannot be offered; a note has its path. Or the name or the token is no text.
      ValueError: an address is no ``host:port``, or it is missing although the processes are on
        several machines; or it is ``0.0.0.0``, every address of the machine; or the token is empty.
      OSError: the address cannot be listened on.
      DisagreementError, LateProcessError: the processes have different trees, or one is late.

    >>> import gda, jax, numpy as np
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:8]), ('x',))
    >>> w = gda.GlobalArray.from_callback((8, 2), mesh, P('x'), lambda i: np.ones((1, 2)))
    >>> with gda.offer({'w': w, 'step': 3}) as offer:
    ...     tree = gda.pull(offer.address, mesh, P(None, 'x'), pad=True)
    >>> tree['w'].shape, tree['step']
    ((8, 2), 3)
    """
    place = Address(_LOOPBACK, 0) if address is None else Address.of(address)
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, not {name!r:.80}")
    check_token(token)
    if token == "":
        raise ValueError("token is empty, which protects nothing; pass a secret, or None")
    if place.is_every:
        raise ValueError(
            f"{address} is every address of this machine; pass the one by which pullers, or a "
            "proxy before them, reach it"
        )
    # The token is compared by a digest, which does not tell it.
    digest = token and hmac.digest(token.encode(), b"the token of a gda.offer", "sha256").hex()[:8]
    arguments = {"address": address, "name": name, "token": digest}
    check_same_call("gda.offer", tree, arguments)
    versions: Versions[HeldTree] = Versions()
    servers: list[OfferProcess] = []
    with contextlib.ExitStack() as after_an_error:

        def begin() -> tuple[HeldTree, OfferServer]:
            held, is_first = _held(tree), jax.process_index() == 0
            catalog = lru_cache(1)(partial(_catalog, versions, name, servers))
            own = place if is_first else address_towards(place)
            server = OfferServer(own, name, token, versions, catalog if is_first else None)
            after_an_error.callback(server.close)
            return held, server

        def share(begun: tuple[HeldTree, OfferServer]) -> dict[str, Any]:
            held, server = begun
            return {"server": [str(server.address), machine()], "values": held.values}

        def decide(parts: dict[int, Any]) -> Any:
            check_same_values([part["values"] for part in parts.values()])
            found = [part["server"] for part in parts.values()]
            if address is None and len({machine for _, machine in found}) > 1:
                raise ValueError(
                    f"the processes are on several machines, which {_LOOPBACK} does not connect; "
                    "pass address='host:port', with a host of the first process"
                )
            return found, os.urandom(8).hex()

        done = _step(begin, share=share, decide=decide, what=f"offering {name!r}")
        found, versions.run = done.decision
        servers.extend(OfferProcess(*each) for each in found)
        held, server = done.mine
        versions.update(1, held)
        after_an_error.pop_all()
    return Offer(name, servers[0].address, versions, server)


@set_module("gda")
class Offer:
    """A tree that other programs can pull; ``gda.offer`` makes it.

    Attributes:
      name: that which was given.
      address: that of the first process, for ``gda.pull``; the same in all processes.

    >>> import gda, numpy as np
    >>> offer = gda.offer({'w': np.zeros(2)})
    >>> offer.update({'w': np.ones(2)})
    >>> offer.version, gda.pull(offer.address)
    (2, {'w': array([1., 1.])})
    >>> offer.close()
    """

    def __init__(
        self, name: str, address: str, versions: Versions[HeldTree], server: OfferServer
    ) -> None:
        self.name, self.address = name, address
        self._versions, self._server = versions, server

    @property
    def version(self) -> int:
        """The number of the current version: 1, and one more after each ``update``."""
        return self._versions.current

    @communicates(_UPDATE)
    def update(self, tree: Tree) -> None:
        """Offer the next values; pulls that begin from now on get them.

        Communicates: every process of the program must call it. It does not wait for pulls that
        have begun: they get the version that they began with, whose values stay in memory until
        the first update after their end. If pulls hold more than 8 older versions, those of the
        oldest fail.

        Args:
          tree: as for ``gda.offer``. It may differ from the one before in everything.

        Raises:
          ConnectionError: the offer is closed.
          TypeError, DisagreementError, LateProcessError: as ``gda.offer``.
        """
        if self._versions.is_closed.is_set():
            raise ConnectionError(f"the offer {self.name!r} is closed; make another with gda.offer")
        check_same_call(_UPDATE, tree, {"offer": self._versions.run})

        def held() -> HeldTree:
            after = _held(tree)
            # Not in decide, which a thread may call after Ctrl-C has ended this update.
            self._versions.begin_update()
            return after

        def decide(parts: dict[int, Any]) -> list[int]:
            check_same_values([*parts.values()])
            return self._versions.next_update()

        try:
            what = f"update of the offer {self.name!r}"
            done = _step(held, share=lambda held: held.values, decide=decide, what=what)
            # The number of process 0 counts, also if an update before did not reach this one.
            number, *older = done.decision
            self._versions.update(number, done.mine, older)
        finally:
            self._versions.end_update()

    @public
    def close(self) -> None:
        """End the offer; pulls that have begun fail. Does not communicate."""
        self._server.close()

    def __enter__(self) -> Offer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _step(*args: Any, **options: Any) -> Any:
    """Do a step of all processes; an error about one tree is raised in all of them."""
    shared = (TypeError, ValueError, DisagreementError)
    return all_do(*args, **options, shared=shared, timeout=timeout_of_checks())


def _held(tree: Any) -> HeldTree:
    """Return the tree with the blocks of this process, safe from later changes."""
    structure, flat = flatten(tree)
    leaves: list[SavedLeaf | ValueLeaf] = []
    for leaf in with_blocks(given_leaves(flat, Options()), are_held=True):
        if isinstance(leaf, SavedPerProcess):
            with noting_path(leaf.record.path):
                raise TypeError("a PerProcess cannot be offered, because it has several values")
        if isinstance(leaf, SavedLeaf) and leaf.is_source:
            with noting_path(leaf.record.path):
                raise TypeError("a source cannot be offered; load it with gda.load_tree")
        leaves.append(leaf)
    values = values_of(leaves) if jax.process_count() > 1 else {}
    held = [
        kept(leaf)._replace(grid=leaf.grid if leaf.own is None else None)
        if isinstance(leaf, SavedLeaf)
        else leaf
        for leaf in leaves
    ]
    return HeldTree(held, structure, values)


def _catalog(
    versions: Versions[HeldTree], name: str, servers: Sequence[OfferProcess], version: int
) -> bytes:
    """Return the catalog of a version, in the first process."""
    tree, _ = versions.get(versions.run, version, Deadline(0))
    layouts = LayoutNumbers(len(servers))
    leaves = [
        replace(leaf.record, array=layouts.number_of(leaf.grid))
        if isinstance(leaf, SavedLeaf)
        else leaf
        for leaf in tree.leaves
    ]
    meshes, of_arrays = layouts.both
    return Catalog(
        leaves=tuple(leaves),
        structure=tree.structure,
        name=name,
        run=versions.run,
        version=version,
        meshes=meshes,
        layouts=of_arrays,
        servers=tuple(servers),
    ).to_json()
