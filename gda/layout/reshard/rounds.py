"""The rounds in which pieces go between processes: in one, a device sends and gets one packet each.

A *packet* is what one device sends to another in a round: some pieces, as many as fit. Packets of
nearly one length make a round together, because a collective sends as much from each device.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from gda.layout.spec import Shape

# A length is rounded up to so many binary digits: at most 1/32 more is sent.
_DIGITS = 6


class Piece(NamedTuple):
    """A box of elements that one device gets from another, or keeps.

    Attributes:
      leaf: number of the array.
      source, target: the devices, by any numbers.
      source_starts, target_starts: place of the box in the block of either device.
      sizes: of the box.
    """

    leaf: int
    source: int
    target: int
    source_starts: Shape
    target_starts: Shape
    sizes: Shape

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    def parts(self, most: int) -> Iterator[Piece]:
        """Yield the piece in parts of at most ``most`` elements, contiguous where they can be."""
        steps = list(self.sizes)
        for dimension, size in enumerate(steps):
            inner = math.prod(steps[dimension + 1 :])
            steps[dimension] = min(size, max(most // inner, 1))
            if inner <= most:
                break
        ranges = (range(0, size, step) for size, step in zip(self.sizes, steps, strict=True))
        for offsets in product(*ranges):
            yield self._replace(
                source_starts=_sum(self.source_starts, offsets),
                target_starts=_sum(self.target_starts, offsets),
                sizes=tuple(
                    min(step, size - offset)
                    for step, size, offset in zip(steps, self.sizes, offsets, strict=True)
                ),
            )


class Packet(NamedTuple):
    """The pieces that one device sends to another in one round."""

    source: int
    target: int
    pieces: list[Piece]

    @property
    def size(self) -> int:
        """The number of elements."""
        return sum(piece.size for piece in self.pieces)

    def placed(self) -> Iterator[tuple[int, Piece]]:
        """Yield the pieces with their places in a flat buffer, one after the other."""
        offset = 0
        for piece in self.pieces:
            yield offset, piece
            offset += piece.size


class Round(NamedTuple):
    """Packets that are sent at the same time, from different devices to different devices.

    Attributes:
      length: elements that each sender sends, at least those of its packet.
      packets: in the order of the senders.
    """

    length: int
    packets: tuple[Packet, ...]

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """Sender and receiver of each packet."""
        return tuple((packet.source, packet.target) for packet in self.packets)


def rounds_of(pieces: Iterable[Piece], most: int) -> list[Round]:
    """Return the rounds that carry all pieces; the same in every process that has the same pieces.

    A packet has at most ``most`` elements. A device is a sender and a receiver by the same number.
    """
    by_length: defaultdict[int, list[Packet]] = defaultdict(list)
    for packet in _packets(pieces, most):
        by_length[_rounded(packet.size, most)].append(packet)
    rounds = []
    for length, packets in sorted(by_length.items(), reverse=True):
        rounds += [
            Round(length, tuple(sorted(some, key=lambda packet: packet.source)))
            for some in _disjoint(packets)
        ]
    return rounds


def _packets(pieces: Iterable[Piece], most: int) -> Iterator[Packet]:
    of_pair: defaultdict[tuple[int, int], list[Piece]] = defaultdict(list)
    for piece in pieces:
        of_pair[piece.source, piece.target] += piece.parts(most)
    for (source, target), parts in of_pair.items():
        packet, size = Packet(source, target, []), 0
        for part in parts:
            if size + part.size > most:
                yield packet
                packet, size = Packet(source, target, []), 0
            packet.pieces.append(part)
            size += part.size
        yield packet


def _rounded(size: int, most: int) -> int:
    shift = max(size.bit_length() - _DIGITS, 0)
    return min(-(-size >> shift) << shift, most)


def _disjoint(packets: list[Packet]) -> Iterable[list[Packet]]:
    """Return the packets in rounds: each goes into the first in which both its devices are free.

    Packets that go as far around all devices come together, so all to all takes few rounds.
    """
    devices = sorted({device for packet in packets for device in (packet.source, packet.target)})
    rank = {device: place for place, device in enumerate(devices)}

    def turn(packet: Packet) -> int:
        return (rank[packet.target] - rank[packet.source]) % len(devices)

    # Bit r is set if the device sends, or gets, a packet in round r.
    sends: defaultdict[int, int] = defaultdict(int)
    gets: defaultdict[int, int] = defaultdict(int)
    rounds: defaultdict[int, list[Packet]] = defaultdict(list)
    for packet in sorted(packets, key=turn):
        taken = sends[packet.source] | gets[packet.target]
        free = ~taken & (taken + 1)
        sends[packet.source] |= free
        gets[packet.target] |= free
        rounds[free].append(packet)
    return rounds.values()


def _sum(starts: Sequence[int], offsets: Sequence[int]) -> Shape:
    return tuple(map(sum, zip(starts, offsets, strict=True)))
