"""Texts in JSON that are hostile: each is refused with a ``ValueError``, most before parsing."""

import tracemalloc

import pytest

from gda.layout import strict_json
from gda.layout.strict_json import check_memory, parse_json

MIB = 2**20


def repeated(value: str, nbytes: int) -> str:
    return "[" + f"{value}," * (nbytes // (len(value) + 1) - 1) + value + "]"


def test_a_text_that_is_refused() -> None:
    for text, said in [
        ("[" * 200_000 + "]" * 200_000, "nested too deeply"),
        ('{"a":' * 200_000, "nested too deeply"),
        ('{"a": 1, "a": 2}', "one object has these names twice: 'a'"),
        ("[NaN]", "NaN is not a number of JSON"),
        ("1" * 5000, "integer string conversion"),
        ("", "Expecting value"),
    ]:
        with pytest.raises(ValueError, match=said):
            parse_json(text)


@pytest.mark.parametrize("value", ["[]", '{"":""}', '{"a":{"b":[]}}'])
def test_many_lists_and_objects_are_refused_before_they_are_parsed(value: str) -> None:
    text = repeated(value, 24 * MIB)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="it has so many .* memory; expected are at most"):
            parse_json(text)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_many_numbers_take_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "_MOST_BYTES", 2**20)
    most = 2**20 // 64
    check_memory(repeated("3", 2 * (most - 1)))
    with pytest.raises(ValueError, match="it has so many values that they may take"):
        check_memory(repeated("3", 2 * (most + 1)))


def test_a_small_text_may_consist_of_empty_lists() -> None:
    check_memory(repeated("[]", MIB // 2))
    assert parse_json(repeated("[]", 3 * 100)) == [[]] * 100


def test_a_long_text_of_ordinary_entries_may_be_read() -> None:
    check_memory(repeated('{"path":[0],"kind":"int","value":"1"}', 7 * MIB))
