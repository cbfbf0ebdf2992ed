"""Rounds carry each element of each piece once, and load no device twice at a time."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gda.layout.reshard.rounds import Piece, rounds_of

SIZES = st.integers(0, 3).flatmap(lambda rank: st.tuples(*[st.integers(1, 6)] * rank))


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    found = []
    for leaf in range(draw(st.integers(0, 12))):
        sizes = draw(SIZES)
        starts = [tuple(draw(st.integers(0, 3)) for _ in sizes) for _ in range(2)]
        devices = draw(st.permutations(range(5)))[:2]
        found.append(Piece(leaf, *devices, *starts, sizes))
    return found


@given(pieces=pieces(), most=st.integers(1, 40))
def test_rounds_carry_each_element_once(pieces: list[Piece], most: int) -> None:
    rounds = rounds_of(pieces, most)
    sent: Counter[tuple[object, ...]] = Counter()
    for each in rounds:
        assert len({packet.source for packet in each.packets}) == len(each.packets)
        assert len({packet.target for packet in each.packets}) == len(each.packets)
        assert each.length <= most
        for packet in each.packets:
            assert packet.size <= each.length <= max(packet.size * 33 / 32, packet.size)
            offsets, parts = zip(*packet.placed(), strict=True)
            assert list(offsets) == np.cumsum([0, *[part.size for part in parts]])[:-1].tolist()
            for part in parts:
                assert (part.source, part.target) == (packet.source, packet.target)
                for place in np.ndindex(*part.sizes):
                    ends = [
                        tuple(map(sum, zip(start, place, strict=True)))
                        for start in (part.source_starts, part.target_starts)
                    ]
                    sent[part.leaf, part.source, part.target, *ends] += 1
    wanted = Counter(
        (
            piece.leaf,
            piece.source,
            piece.target,
            tuple(map(sum, zip(piece.source_starts, place, strict=True))),
            tuple(map(sum, zip(piece.target_starts, place, strict=True))),
        )
        for piece in pieces
        for place in np.ndindex(*piece.sizes)
    )
    assert sent == wanted


def test_all_to_all_takes_one_round_for_each_other_device() -> None:
    pieces = [
        Piece(0, source, target, (0,), (0,), (100,))
        for source in range(8)
        for target in range(8)
        if source != target
    ]
    rounds = rounds_of(pieces, 100)
    assert [each.length for each in rounds] == [100] * 7
    assert all(len(each.packets) == 8 for each in rounds)


def test_small_pieces_of_many_arrays_go_together() -> None:
    pieces = [Piece(leaf, 0, 1, (0,), (0,), (3,)) for leaf in range(1000)]
    (only,) = rounds_of(pieces, 4096)
    assert only.length == 3008  # 3000, in six binary digits
    assert only.pairs == ((0, 1),)


def test_a_large_piece_goes_in_parts_of_whole_rows() -> None:
    rounds = rounds_of([Piece(0, 0, 1, (0, 0), (8, 0), (10, 100))], 250)
    assert [each.packets[0].pieces[0].sizes for each in rounds] == [(2, 100)] * 5
    (first, *_) = rounds_of([Piece(0, 0, 1, (0, 0), (8, 0), (10, 100))], 30)
    assert first.packets[0].pieces[0].sizes == (1, 30)
