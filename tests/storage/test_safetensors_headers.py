"""Headers that somebody hostile made: two readers of one file must not disagree about it."""

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from open_files import little_memory
from safetensors import SafetensorError, safe_open
from trials import Trials, tried

from gda.storage import open_safetensors

HEADER = (
    '{"__metadata__":{"k":"v"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"other":7},'
    '"z":{"dtype":"F32","shape":[0,3],"data_offsets":[1,1]}}'
)

TEXTS = [r"\ud800", r"\udc00", r"\ude00\ud83d", r"\ud83d\ude00", r"\\ud800", r"\u0000", r"\u12G4"]
TEXTS += [
    "",
    "\t",
    "\x7f",
    "\u00e9",
    r"\/",
    r"\x41",
    "\ufeff",
    "__metadata__",
    "w",
    "z",
    "x" * 5000,
]
NUMBERS = ["-0", "0", "-1", "01", "+1", "1.0", "1e0", "1e400", "-1e400", "1e-400", ".5", "NaN"]
NUMBERS += ["-Infinity", str(2**60), str(2**63 - 1), str(2**63), str(2**64 - 1), str(2**64)]
NUMBERS += ["-" + "9" * 30, "1" + "0" * 300, "1" + "0" * 400, "1" + "0" * 5000, "0x1", "1_0"]
VALUES = [*NUMBERS, "null", "true", "{}", "[]", '"\ud83d\ude00"', '{"a":1,"b":[2]}', "''"]
DTYPES = ["BOOL", "F4", "F6_E2M3", "F8_E4M3", "F8_E3M4", "C64", "C128", "u8", "U4", ""]
ZEROS = ["0", "0,0", f"{2**60},{2**60},0", f"0,{2**60},{2**60}", f"{2**32},{2**32},0", f"{2**63},0"]
ZEROS += [f"{2**32},{2**31},0", "-0", "0.0", "1,0" + ",1" * 62, "0" + ",1" * 64, f"0,{2**64}"]

# Parts of HEADER, and texts to put in their places.
CHANGES: dict[str, list[str]] = {
    '{"k":"v"}': [*VALUES, '["k","v"]', '"text"', '{"k":"v","k":"v"}', '{"k":"v","l":""}'],
    '"k"': [f'"{text}"' for text in TEXTS] + ["k", "'k'", "3"],
    '"v"': [f'"{text}"' for text in TEXTS] + VALUES,
    '"w"': [f'"{text}"' for text in TEXTS],
    '"U8"': [f'"{dtype}"' for dtype in DTYPES] + ['{"U8":null}', '{"U8":[]}', '["U8"]', "3"],
    "[1]": [f"[{number}]" for number in NUMBERS] + ["[]", "[1,1]", "[[1]]", "1", '{"0":1}', "[1,]"],
    "[0,1]": [f"[{number},1]" for number in NUMBERS] + ["[0]", "[0,1,1]", "[1,0]", '{"0":0,"1":1}'],
    "[1,1]": [f"[1,{number}]" for number in NUMBERS] + ["[0,0]", "[0,1]", "[2,2]"],
    "[0,3]": [f"[{zeros}]" for zeros in ZEROS],
    "7": VALUES,
    '"other":7': ['"dtype":"U8"', '"shape":[1]', '"other":7,"other":7', '"other":{"a":1,"a":1}']
    + [f'"other":{"[" * depth}{"]" * depth}' for depth in (1, 124, 125, 126, 127, 900, 50_000)]
    + [f'"other":{{"a":{"[" * depth}{"]" * depth}}}' for depth in (123, 124, 125)]
    + [f'"{text}":7' for text in TEXTS],
    '{"dtype":"U8","shape":[1],"data_offsets":[0,1],"other":7}': [
        '["U8",[1],[0,1]]',
        '["U8",[1],[0,1],7]',
        "null",
        "[]",
        '{"dtype":"U8","shape":[1]}',
    ],
    '{"__metadata__"': [
        ' \t\r\n{ "__metadata__"',
        '\ufeff{"__metadata__"',
        '\x0c{"__metadata__"',
        '{/**/"__metadata__"',
        '{"__metadata__":{},"__metadata__"',
        '[{"__metadata__"',
        '{,"a"',
    ],
    "}}": ["}} \t\r\n", "}}\0", "}}\x0c", "}}}", "}},", "}},{}", "}},}", "}", "}, }", "}\u00a0}"],
}
CASES = [(part, text) for part, texts in CHANGES.items() for text in texts]

# The format forbids what the package accepts here, or NumPy has no array of this shape.
REFUSED_BY_GDA_ALONE = [
    "one object has these names twice",
    "its entry in the header needs dtype, shape and data_offsets",
    "is unknown; expected is one of",
    "is not a list of at most 64 sizes",
]

Found = dict[str, tuple[Any, ...] | None]


def read_by_package(path: Path) -> Found | None:
    """Return the tensors, each with its shape and bytes, ``None`` if it is not read at all."""
    found: Found = {}
    try:
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                try:
                    array = file.get_tensor(name)
                    found[name] = (array.shape, array.tobytes())
                except (SafetensorError, AttributeError, TypeError, ValueError):
                    found[name] = None  # NumPy has no such array
    except SafetensorError:
        return None
    return found


def read(path: Path) -> Found | str:
    """Return the same, or the message that says why the file is refused."""
    found: Found = {}
    try:
        tensors = open_safetensors(path)
    except ValueError as error:
        return str(error)
    for name in tensors:
        try:
            array = tensors[name][...]
            found[name] = (array.shape, array.tobytes())
        except (TypeError, ValueError):
            found[name] = None
    return found


def outcome(path: Path, header: str) -> str:
    """Return what the two readers do with a header, after comparing what they read."""
    text = header.encode(errors="surrogatepass")
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"1")
    ours, theirs = read(path), read_by_package(path)
    if isinstance(ours, str):
        assert path.name in ours
        if theirs is None:
            return "refused by both"
        assert any(reason in ours for reason in REFUSED_BY_GDA_ALONE), ours
        return "refused by gda alone"
    assert theirs is not None, "refused by the package alone"
    assert ours.keys() == theirs.keys()
    # The package has no 8-bit floats for NumPy.
    assert all(ours[name] == theirs[name] for name in ours if theirs[name] is not None)
    return "read equally"


@pytest.mark.parametrize("part", CHANGES)
def test_readers_agree_about_a_hostile_header(part: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    assert outcome(path, HEADER) == "read equally"
    assert part in HEADER
    for text in CHANGES[part]:
        try:
            outcome(path, HEADER.replace(part, text, 1))
        except AssertionError as error:
            error.add_note(f"{text!r:.100} in place of {part}")
            raise


REFUSED = [
    ('{"k":"v"}', "[]", "__metadata__ .* does not map texts to texts"),
    ('{"k":"v"}', '{"k":3}', "__metadata__ .* does not map texts to texts"),
    ('"w"', r'"\ud800"', "not JSON: it has a surrogate without the other half"),
    ('"v"', r'"\ud800"', "not JSON: it has a surrogate without the other half"),
    ("[0,1]", "[-0,1]", r"data_offsets \[-0\.0, 1\] are not begin and end"),
    ("[0,3]", f"[{2**60},{2**60},0]", r"more than 2\*\*64 elements before its zero"),
    ("7", "[" * 126 + "]" * 126, "nested too deeply, or has a number that is too large"),
    ("7", "1e400", "nested too deeply, or has a number that is too large"),
]


@pytest.mark.parametrize(("part", "text", "message"), REFUSED)
def test_a_refused_header_is_explained(part: str, text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    assert outcome(path, HEADER.replace(part, text, 1)) == "refused by both"
    with pytest.raises(ValueError, match=message):
        open_safetensors(path)


@tried("a hostile header of a safetensors file", sample=300, full=50_000)
def test_readers_agree_about_any_header(tmp_path: Path, trials: Trials) -> None:
    chance = trials.chance
    path = tmp_path / "hostile.safetensors"
    for _ in range(trials.most):
        header = HEADER
        for part, text in chance.sample(CASES, chance.choice([0, 1, 1, 2, 3])):
            header = header.replace(part, text, 1)
        for _ in range(chance.choice([0, 0, 1, 1, 2, 5])):
            at, length = chance.randrange(len(header)), chance.choice([0, 1, 1, 2, 8])
            new = [header[at], chance.choice('"\\{}[]:,-0129.eE un'), chr(chance.randrange(0x300))]
            part = header[chance.randrange(len(header)) :][: chance.randrange(60)]
            header = header[:at] + chance.choice([*new, "", part]) + header[at + length :]
        try:
            trials.count(outcome(path, header))
        except AssertionError as error:
            error.add_note(f"the header {header!r:.2000}")
            raise


# Too large.


@pytest.mark.parametrize(
    "text",
    [b'{"w":[' + b",".join([b"[]"] * 2_000_000) + b"]}", b'{"w":"' + b"w" * 32_000_000 + b'"}'],
    ids=["values", "bytes"],
)
@pytest.mark.parametrize("name", ["a.safetensors", "model.safetensors.index.json"])
def test_a_header_or_an_index_that_is_too_large_is_not_parsed(
    text: bytes, name: str, tmp_path: Path
) -> None:
    path = tmp_path / name
    head = b"" if name.endswith(".json") else struct.pack("<Q", len(text))
    path.write_bytes(head + text)
    message = rf"{re.escape(name)} has a header of \d+ (value|byte)s"
    with little_memory(2.5 * len(text)), pytest.raises(ValueError, match=message):
        open_safetensors(path)


def test_an_index_with_a_long_file_name(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    for file in ("x" * 5000, "x" * 256, "x/" * 2100 + "x", "\u00e9" * 200):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(
            ValueError, match=r"index\.json: the file of tensor 'w' is .*too long; a"
        ):
            open_safetensors(index)
    index.write_text('{"weight_map": {"w": "\\ud800"}}')
    with pytest.raises(ValueError, match="not JSON: it has a surrogate without the other half"):
        open_safetensors(index)
