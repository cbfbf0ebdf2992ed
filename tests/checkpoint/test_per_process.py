"""Values that each process has by itself, saved and restored by as many processes and others."""

import logging
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from damaged import Damaged, flip, leaf_at
from meshes import one_folder

import gda
from gda.checkpoint import CorruptionError, PerProcess, diff, inspect, restore, save, save_async
from gda.checkpoint.converting import convert
from gda.trees.per_process import from_bytes, to_bytes

FOUR, TWO = (4, 2), (2, 4)  # processes and devices of each


def state_here() -> dict[str, Any]:
    """A state with values that differ between processes in type and size."""
    process = jax.process_index()
    own = {"next": process, "rows": np.arange(3 * process), "buffer": b"x" * process}
    return {"step": 7, "data": PerProcess(own), "only": PerProcess(None if process else "first")}


def state_by_index(index: int) -> dict[str, Any]:
    return {"step": 7, "w": np.arange(4.0), "data": PerProcess([index])}


def concatenated(values: list[Any], count: int) -> list[Any]:
    """Deal what all processes had to ``count`` processes."""
    dealt = [each for value in values for each in value]
    return [dealt[process::count] for process in range(count)]


@pytest.mark.processes(4, devices=2)
def test_each_process_gets_back_what_it_had() -> None:
    folder, state = one_folder(), state_here()
    gda.check_processes_agree(state)  # does not compare the values
    pending = save_async(f"{folder}/c", state)
    kept = to_bytes(state["data"].value)
    state["data"].value["rows"][...] = 9  # after the call, it may change
    state["data"].value["next"] = 9
    pending.result()
    like = {"step": 0, "data": PerProcess(object()), "only": PerProcess(0)}
    for restored in (
        restore(f"{folder}/c"),
        restore(f"{folder}/c", like),
        restore(f"{folder}/c", like, merge=concatenated, read_once=True),
        gda.checkpoint.open(f"{folder}/c"),
    ):
        assert restored["step"] == 7
        assert to_bytes(restored["data"].value) == kept
        assert restored["only"] == state_here()["only"]
    rows = gda.checkpoint.verify(f"{folder}/c").rows
    for row, name in zip(rows, ("data", "only"), strict=False):
        nbytes = sum(file.stat().st_size for file in Path(folder).glob(f"c/*/*.{name}.?"))
        assert row == (f"{name}", "PerProcess", f"{nbytes} B", "the values of 4 processes")
    gda.check_processes_agree({})  # before the files are replaced
    assert diff(f"{folder}/c", state_here()).are_equal
    changed = state_here()
    if jax.process_index() == 2:
        changed["data"].value["next"] = 5
    save(f"{folder}/c", changed, overwrite=True)
    assert diff(f"{folder}/c", changed).are_equal
    differences = diff(f"{folder}/c", state_here())
    assert [each.path for each in differences.of_other_content] == [("data",)]
    assert differences.num_equal == 2


@pytest.mark.processes(4, devices=2)
def test_an_error_about_a_value_is_raised_in_all_processes() -> None:
    folder, process = one_folder(), jax.process_index()
    with pytest.raises(TypeError, match="a PerProcess cannot be offered"):
        gda.offer(state_here())
    state = state_here()
    if process == 1:
        state["data"] = 7
    with pytest.raises(gda.DisagreementError, match="process 1: type int"):
        save(f"{folder}/c", state)
    state["data"] = PerProcess(object() if process == 1 else 3)
    with pytest.raises(TypeError if process == 1 else gda.checkpoint.SaveError) as caught:
        save(f"{folder}/c", state)
    assert "a PerProcess cannot hold <object object" in str(caught.value)
    assert not Path(f"{folder}/c/manifest.json").exists()
    save(f"{folder}/c", state_here())
    if process == 0:
        (file,) = Path(folder).glob("c/data-*/*.data.1")
        file.write_bytes(file.read_bytes()[:-1])
    gda.check_processes_agree({})
    with pytest.raises(CorruptionError if process == 1 else gda.DisagreementError) as caught:
        restore(f"{folder}/c", read_once=True)
    assert "value data of process 1: " in str(caught.value)
    assert " bytes, not " in str(caught.value)


def save_by_index(path: str) -> None:
    save(path, state_by_index(jax.process_index()))


def save_again(path: str, to: str) -> tuple[str, Any, list[str]]:
    """Restore onto another number of processes, with and without ``merge``; save that."""
    with pytest.raises(ValueError, match="does not fit") as caught:
        restore(path)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("gda")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        state = restore(path, state_by_index(0), merge=concatenated)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    save(to, state)
    return str(caught.value), state["data"].value, lines


def test_fewer_and_more_processes_merge_the_values(
    process_pool: Callable[..., Any], tmp_path: Path
) -> None:
    four, two, one = (str(tmp_path / name) for name in ("four", "two", "one"))
    process_pool(*FOUR).run(save_by_index, four)
    (message, first, said), (_, second, unsaid) = process_pool(*TWO).run(save_again, four, two)
    assert message == (
        "the checkpoint does not fit: at data, it has the values of 4 processes, and this "
        "program has 2; pass merge=, a function that takes the list of the 4 values and 2, and "
        "returns 2 values"
    )
    assert (first, second) == ([0, 2], [1, 3])
    assert said == [f"data of {four}: merged the values of 4 processes for 2"]
    assert not unsaid
    _, values, _ = save_again(two, one)
    assert values == [0, 2, 1, 3]
    assert restore(one)["data"] == PerProcess(values)
    assert [dealt for _, dealt, _ in process_pool(*FOUR).run(save_again, two, f"{four}2")] == [
        *([0], [2], [1], [3])
    ]
    convert(four, f"{tmp_path}/converted", merge=lambda values, count: [concatenated(values, 1)])
    assert restore(f"{tmp_path}/converted")["data"] == PerProcess([[0, 1, 2, 3]])
    with pytest.raises(ValueError, match=r"merge returned 3 values for 1 process;") as caught:
        restore(four, merge=lambda values, count: values[:3])
    assert caught.value.__notes__ == ["gda: at data of the tree"]
    like = {"step": 0}
    assert restore(four, like, partial=True) == {"step": 7}
    assert diff(four, two).of_other_type[0].path == ("data",)

    # The file of a process that is not here is looked at before the merge, and by verify.
    damaged = Damaged(Path(four))
    (file,) = damaged.data.glob("*.2")
    for data, problem in (
        (flip(file.read_bytes(), 1), "is damaged"),
        (file.read_bytes() + b" ", "has 5 bytes; expected are at most 4"),
        (None, "is missing"),
    ):
        with damaged.changed(file, data):
            for read in (gda.checkpoint.verify, lambda path: restore(path, merge=concatenated)):
                with pytest.raises(CorruptionError) as caught:
                    read(four)
                line = f"value data of process 2: {file} {problem}"
                assert caught.value.problems == (line,)
    opened = gda.checkpoint.open(four)  # the rest can be used
    np.testing.assert_array_equal(opened["w"], np.arange(4.0))
    with pytest.raises(ValueError, match="has the values of 4 processes, and this program has 1"):
        np.asarray(opened["data"])


def test_hostile_records_are_refused(tmp_path: Path) -> None:
    save(tmp_path, state_by_index(0) | {"only": PerProcess(1)})
    damaged = Damaged(tmp_path)
    for files, message in [
        ([], ".files is []; expected is a size and a CRC-32C for each process"),
        ([[4]], ".files is [[4]]; expected is"),
        ([[4, -1]], ".files is [[4, -1]]; expected is"),
        ([[2**61, 1]], ".files is [[2305843009213693952, 1]]; expected is"),
        ("4", ".files is '4'; expected is"),
        ([[4, 5], [4, 5]], ": two leaves have the files of different numbers of processes"),
    ]:
        damaged.seal(lambda body, files=files: leaf_at(body, "data").update(files=files))
        with pytest.raises(CorruptionError) as caught:
            inspect(tmp_path)
        assert message in str(caught.value)
    damaged.seal(lambda body: leaf_at(body, "data").update(name="../x"))
    with pytest.raises(CorruptionError, match="name is '../x'"):
        restore(tmp_path)


def test_a_hostile_file_runs_no_code_and_takes_no_memory() -> None:
    for file in (
        *(b"", b"{}", b"NaN\n", b"\xff", b"[" * 10**5, b'{"a":1,"b":2}\n', b'{"exec":"1"}\n'),
        *(b'{"bytes":5}\nab', b'{"array":["int8",[1000000000000]]}\n', b'{"dict":[[[1],2]]}\n'),
        *(b'{"array":["object",[1]]}\n12345678', b'{"float":[1]}\n', b"cos\nsystem\n", b"1\nmore"),
    ):
        with pytest.raises(ValueError, match="has no value of a PerProcess|bytes too many"):
            from_bytes(file)


VALUES = [
    *(None, True, 0, -(2**200), -0.0, 0.1, float("nan"), float("-inf"), "a\ud800", b"", b"\n\0"),
    *([], (), {}, {"a": [1, (2, None)], 3: b"x", "b": {"c": []}}, random.Random(1).getstate()),
    *(np.arange(6).reshape(2, 3).T, np.zeros((0, 3), np.float32), np.array(3, ">i4")),
    *(np.float64(3), np.bool_(True), ml_dtypes.bfloat16(2), np.ones(3, ml_dtypes.int4)),
    *(np.random.default_rng(0).bit_generator.state, np.random.RandomState(0).get_state()),
]


def test_values_come_back_with_their_types() -> None:
    def described(value: Any) -> Any:
        if isinstance(value, np.ndarray | np.generic):
            return type(value), value.dtype.name, value.shape, value.tolist()
        if isinstance(value, list | tuple):
            return type(value), [*map(described, value)]
        if isinstance(value, dict):
            return [(key, described(each)) for key, each in value.items()]
        return type(value), repr(value)

    for value in VALUES:
        assert described(from_bytes(to_bytes(value))) == described(value)
    array = from_bytes(to_bytes([np.ones(3)]))[0]
    array += 1  # it may be written
    assert from_bytes(to_bytes(OrderedDict(b=1, a=2))) == {"b": 1, "a": 2}


def test_values_that_a_file_does_not_hold() -> None:
    for value in (
        {1.5: 2},
        {True: 1},
        np.array(["a"]),
        np.array([None]),
        {1},
        1j,
        jax.numpy.ones(2),
    ):
        with pytest.raises(TypeError, match="a PerProcess cannot hold"):
            to_bytes([value])
    with pytest.raises(TypeError, match="a masked array would lose its mask"):
        to_bytes(np.ma.masked_array([1, 2], [False, True]))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([{} for _ in range(250_000)], "so many lists and objects .* Put its numbers into NumPy"),
        (nested(101), "nested in more than 100 lists, tuples and dicts; flatten it"),
    ],
    ids=["many", "deep"],
)
def test_a_value_that_could_not_be_read_again_is_not_saved(
    tmp_path: Path, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        save(tmp_path, {"data": PerProcess(value)})
    assert error.value.__notes__[0] == "gda: at data of the tree"
    assert not [*tmp_path.glob("**/manifest.json")]


def test_values_near_the_limits_are_read_again() -> None:
    for value in (nested(100), "[" * 2**21, "\ud800" * 70_000, [{} for _ in range(190_000)]):
        assert from_bytes(to_bytes(value)) == value


def test_two_are_equal_if_their_content_is() -> None:
    one, other = (PerProcess({"a": np.arange(3), "b": float("nan")}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert PerProcess(1) != PerProcess(1.0)
    assert PerProcess(1) != 1


def test_functions_of_trees_leave_it_as_it_is(auto_mesh: Any) -> None:
    own = PerProcess({"next": 3})
    tree = {"data": own, "w": np.arange(8.0)}
    placed = gda.load_tree(tree, auto_mesh, jax.sharding.PartitionSpec("x"))
    for given in (
        placed,
        gda.to_jax(placed),
        gda.to_numpy(placed),
        gda.reshard_tree(placed, auto_mesh, jax.sharding.PartitionSpec()),
        gda.fingerprint(placed),
        jax.tree.map(lambda leaf: leaf, placed),
    ):
        assert given["data"] is own
    gda.check_replicas_agree(placed)


def test_like_and_the_checkpoint_must_both_have_one(tmp_path: Path) -> None:
    save(tmp_path, {"step": 3, "data": PerProcess(5)})
    for like, message in (
        (
            {"step": 0, "data": 5},
            "at data, it has a value for each process, and like has the int 5; put a "
            "gda.checkpoint.PerProcess there",
        ),
        (
            {"step": PerProcess(0), "data": PerProcess(0)},
            "at step, it has the int 3, and like has the PerProcess PerProcess(0); put a value "
            "of type int there",
        ),
    ):
        with pytest.raises(ValueError, match="does not match like") as caught:
            restore(tmp_path, like)
        assert str(caught.value) == f"the checkpoint does not match like: {message}"
    grown = {"step": 0, "data": PerProcess(0), "new": PerProcess(1)}
    assert restore(tmp_path, grown, missing="keep")["new"] == PerProcess(1)
