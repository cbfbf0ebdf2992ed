"""The report of the memory."""

from gda.show.memory_report import ArrayMemory, DeviceMemory, MemoryReport

GIB = 2**30
PLACE = "P('data', 'model') on data=4,model=2"


def row(*names: str, nbytes: int = 8 * GIB, count: int = 1) -> ArrayMemory:
    layout = "P('data', 'model') on data=4,model=2"
    return ArrayMemory(names, count, (1024, 1024), "bfloat16", layout, None, nbytes, nbytes // 8)


def on(number: int, in_use: int | None = None, kind: str | None = None) -> DeviceMemory:
    by_tree = {"params": GIB, "unnamed": GIB // 2}
    limit = None if in_use is None else 16 * GIB
    return DeviceMemory(f"TPU {number}", kind, 3 * GIB // 2, by_tree, in_use, limit)


REPORT = MemoryReport(
    (row("params/w", "ema/w"), row(nbytes=4 * GIB, count=288)),
    tuple(on(i, 2 * GIB if i < 3 else 3 * GIB) for i in range(4)),
)


def test_the_tables_of_a_report() -> None:
    assert str(REPORT).splitlines() == [
        "6.0 GiB in 289 arrays on 4 devices",
        "",
        "device    params    unnamed   arrays   in use  not in arrays     limit",
        "TPU 0-2  1.0 GiB  512.0 MiB  1.5 GiB  2.0 GiB      512.0 MiB  16.0 GiB",
        "TPU 3    1.0 GiB  512.0 MiB  1.5 GiB  3.0 GiB        1.5 GiB  16.0 GiB",
        "",
        f"{'array':39}{'layout':38}per device   in all",
        f"params/w = ema/w  bfloat16[1024,1024]  {PLACE:39}  1.0 GiB  8.0 GiB",
        f"288 unnamed       bfloat16[1024,1024]  {PLACE:39}512.0 MiB  4.0 GiB",
    ]


def test_many_rows_are_cut_short_and_lines_fit() -> None:
    rows = [row(f"params/layer{i}/attention/query/kernel") for i in range(60)]
    text = str(MemoryReport(tuple(rows), (on(0),)))
    assert max(map(len, text.splitlines())) <= 100
    assert "layer19" in text
    assert "layer20" not in text
    assert text.splitlines()[-1] == "… 40 more, 320.0 GiB"
    devices = tuple(on(i, GIB * (2 + i)) for i in range(64))
    assert "… 44 more" in str(MemoryReport((row(),), devices))


def test_control_characters_of_names_do_not_reach_the_terminal() -> None:
    report = MemoryReport((row("p['\x1b[2J']"),), (on(0),))
    assert "\x1b" not in str(report)


def test_nothing_held_is_a_report_too() -> None:
    assert str(MemoryReport((), ())) == "0 B in 0 arrays"


def test_numbers_of_a_device() -> None:
    assert on(0).bytes_not_in_arrays is None
    assert on(0, 2 * GIB).bytes_not_in_arrays == GIB // 2
    # Memory that two processes share, or a device that counts otherwise.
    assert on(0, GIB).bytes_not_in_arrays == 0
    assert hash(REPORT) == hash(
        MemoryReport(**{n: getattr(REPORT, n) for n in REPORT.__match_args__})
    )
