"""``gda rehearse``: programs compiled in other processes, for virtual CPU devices and for TPUs."""

import dataclasses
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from meshes import mesh_of
from running import USUAL, Run, wait_until_gone

import gda
from gda.cli import rehearsal_processes, rehearsal_program
from gda.cli.rehearsal_processes import RehearsalReport, RehearsalRequest, reports_of
from gda.compiled.device_clock import Timeline, TimelineEvent
from gda.compiled.devices import measured_steps
from gda.compiled.devices.device_kinds import num_devices_of
from gda.launch.children import Children
from gda.testing.forking import Forked

TRAIN = """
import os
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

def rehearsal(mesh):
    print("a line of the program")
    w = jax.ShapeDtypeStruct((64, 32), np.float32, sharding=NamedSharding(mesh, P(None, "model")))
    x = jax.ShapeDtypeStruct((16, 64), np.float32, sharding=NamedSharding(mesh, P("data")))

    def step(w, *, x):
        return ((x @ w) ** 2).sum()

    return jax.jit(jax.grad(step)), (w,), {"x": x}

def fragile(mesh):
    if mesh.shape["data"] == 1:
        os.kill(os.getpid(), 9)
    w = jax.ShapeDtypeStruct((6, 2), np.float32, sharding=NamedSharding(mesh, P("data", "model")))
    return lambda w: w.sum(axis=1), (w,)

def without_a_tuple(mesh):
    return jax.numpy.sin, {"x": 1.0}

def large(mesh):
    w = jax.ShapeDtypeStruct((2048, 2**20), np.float32, sharding=NamedSharding(mesh, P("data")))
    return jax.jit(lambda w: w + 1), (w,)
"""


class ForkedChildren(Children):
    """Forks the processes of rehearsals, so that they need not import JAX."""

    def start(self, *_: Any, stdout: Any, stderr: Any, **options: Any) -> Forked:
        files = {"stdout": stdout.fileno(), "stderr": stderr.fileno()}
        with open(os.devnull) as nothing:
            options |= {"stdin": nothing.fileno(), "popen": Forked, **files}
            # The server that forks all others.
            options["env"] |= USUAL
            del options["env"]["JAX_ENABLE_COMPILATION_CACHE"]
            return super().start("forked_program:rehearse", **options)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A file with programs to rehearse, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])  # a process of a rehearsal changes its own
    monkeypatch.setattr(rehearsal_processes, "most_processes", lambda: 1)
    monkeypatch.setattr(rehearsal_processes, "Children", ForkedChildren)
    monkeypatch.setattr(measured_steps, "WITHIN", {"v5e": (1.5, 1.0)})
    monkeypatch.setattr(measured_steps, "OVER_SLOW_LINKS", {})
    # JAX's cache does not have this program, so that XLA tells all of it in each process.
    Path("train.py").write_text(TRAIN.replace("x @ w", f"{random.random()} + x @ w"))
    return "train.py"


def test_one_mesh(run: Run, train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command = "rehearse", f"{train}:rehearsal", "--topology", "cpu:4", "--mesh", "data=2,model=2"
    reports: list[tuple[int, RehearsalReport]] = []

    def once(*args: Any) -> Iterator[tuple[int, RehearsalReport]]:
        reports[:] = reports or [*reports_of(*args)]
        yield from reports

    monkeypatch.setattr(rehearsal_processes, "reports_of", once)
    out = run.printed(*command)
    rehearsed = reports[0][1].rehearsal
    assert rehearsed is not None
    assert out == f"{rehearsed}\n\n{rehearsed.collectives}\n"
    assert re.search(r"all-reduce +data +float32\[.*\] +1 +4.0 KiB +train.py:\d+", out)
    code, out, _ = run(*command, "--json")
    about = {
        "topology": "cpu:4",
        "num_slices": 1,
        "mesh": {"data": 2, "model": 2},
        "error": None,
    }
    assert (code, json.loads(out)) == (0, json.loads(json.dumps(about | rehearsed.to_dict())))

    # It is that of the program in this process.
    namespace: dict[str, Any] = {}
    exec(compile(Path(train).read_text(), train, "exec"), namespace)
    fun, args, kwargs = namespace["rehearsal"](mesh_of({"data": 2, "model": 2}))
    found = gda.rehearse(fun, *args, **kwargs)
    for name in ("peak_bytes", "argument_bytes", "output_bytes", "flops", "traffic"):
        assert getattr(found, name) == getattr(rehearsed, name)


def test_a_mesh_that_fails_is_a_row(run: Run, train: str) -> None:
    # Another process takes the place of the one that is killed.
    search = "--topology", "cpu:4", "--mesh", "data,model", "--search"
    code, out, err = run("rehearse", f"{train}:fragile", *search)
    assert code == 0
    first, killed, second, third = err.splitlines()
    assert first == "gda: 3 meshes to rehearse, 1 at a time"
    assert killed.startswith("gda: cpu:4 data=1,model=4: the compiler was killed by SIGKILL, perh")
    assert re.search(r"; took \d+\.\d s; 2 more, about \d+ s$", killed)
    done = (
        r"gda: cpu:4 data=2,model=2: capacity unknown, \d+ B; took \d+\.\d s; 1 more, about \d+ s"
    )
    assert re.fullmatch(done, second)
    assert re.search(r"; took \d+\.\d s$", third)
    heading, _, header, row, _, reasons, killed, *error, last = out.splitlines()
    assert heading == "train.py:fragile on 4 x cpu; bytes are those of one device"
    assert header.split() == ["mesh", "fits", "peak", "over", "model"]
    assert re.fullmatch(r"data=2,model=2  \?  +\d+ B +12 B", row)
    assert reasons.split() == ["no", "rehearsal", "reason"]
    assert killed.endswith("=4  the compiler was killed by SIGKILL, perhaps for lack of memory")
    message = " ".join(line.strip() for line in error)
    assert re.match(r"data=4,model=1  \w+Error: .* 4 times, but the dimension size is 6 ", message)
    assert last == "for a traceback: --mesh data=1,model=4 alone"


def test_a_process_that_is_killed_between_two_meshes_is_a_reason(
    train: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, number = tmp_path / "program.py", tmp_path / "number"
    keep = f"import os\nopen({str(number)!r}, 'w').write(str(os.getpid()))\n"
    program.write_text(f"{keep}def f(mesh):\n    1 / 0\n")

    begin = rehearsal_processes._RehearsalProcess.begin

    def kill_before_the_second(process: Any, request: RehearsalRequest) -> None:
        if number.exists():
            os.kill(int(number.read_text()), signal.SIGKILL)
            wait_until_gone([int(number.read_text())])
        begin(process, request)

    monkeypatch.setattr(rehearsal_processes._RehearsalProcess, "begin", kill_before_the_second)
    requests = [
        RehearsalRequest(str(program), "f", "cpu:2", 1, None, {"x": 2, "y": y}) for y in (1, 1)
    ]
    (_, first), (_, second) = reports_of(requests)
    assert first.reason == "ZeroDivisionError: division by zero"
    assert second.reason == "the compiler was killed by SIGKILL, perhaps for lack of memory"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["nope.py:f", "--mesh", "x=4"], "there is no file 'nope.py' here"),
        (["train.py:f"], "the following arguments are required: --mesh"),
        (
            ["train.py:f", "--topology", "v3:1000x1000", "--mesh", "x,y", "--search"],
            "gda: --topology: v3:1000x1000 would have 2,000,000 devices",
        ),
        (["train.py:f", "--mesh", "x=4", "--search"], "give their names alone: --mesh data,model"),
        (
            ["train.py:f", "--mesh", "x=4", "--target-config", "nope"],
            "--target-config: there is no file 'nope' here",
        ),
        (["train.py:f", "--mesh", "x=4;x=2", "--trace", "t.json"], "--trace draws one mesh"),
        (["train.py:f", "--mesh", "x=4;y"], "--mesh: an axis with its size was expected"),
        (
            ["train.py:f", "--mesh", "x=4", "--topology", "cpu:4", "--topology", "cpu:8"],
            "--mesh has no mesh of the 8 devices of cpu:8",
        ),
        (["train.py:f", "--mesh", "x=4", "--topology", "v5e:auto"], ":auto needs --search"),
        (
            ["train.py:f", "--topology", "v5e:16x16", "--mesh", "a,b,c,d,e", "--search"],
            "there are 495 meshes to rehearse, 1 at a time, and each may take from seconds to "
            "minutes; for all of them add --max-meshes 495, or name fewer axes",
        ),
        (["train.py:f", "--mesh", "x=4", "--price", "v5e=2"], "--price has the kind 'v5e', but"),
        (
            ["train.py:f", "--mesh", "x=4", "--price", "cpu="],
            "'' is not a price above 0; write 2.5",
        ),
        (["train.py:f", "--mesh", "x=4", "--cost", "2e9"], "write my_kernel=2e9, say"),
    ],
)
def test_mistakes(run: Run, train: str, options: list[str], message: str) -> None:
    topology = [] if "--topology" in options else ["--topology", "cpu:4"]
    assert message in run.refusal("rehearse", *options, *topology)


@pytest.mark.parametrize(
    ("function", "size", "message"),
    [
        ("none", 4, "train.py has no function 'none'; it has rehearsal, fragile, "),
        ("large", 3, "the mesh x=3 has 3 devices, but cpu:4 has 4; "),
        ("without_a_tuple", 4, "its arguments, not a tuple of "),
    ],
)
def test_mistakes_of_any_mesh(
    train: str, monkeypatch: pytest.MonkeyPatch, function: str, size: int, message: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "train", None)
    monkeypatch.setattr("jax.clear_caches", lambda: None)  # of this process
    request = RehearsalRequest(train, function, "cpu:4", 1, None, {"x": size})
    report = rehearsal_program._report(request)
    assert report.is_wrong_for_any_mesh
    assert message in report.reason


def test_virtual_devices_take_no_description_of_gpus(train: str) -> None:
    request = RehearsalRequest(train, "rehearsal", "cpu:4", 1, "h100.txt", {"x": 4})
    report = rehearsal_program._report(request)
    assert report.reason == "cpu:4 has no GPUs; omit --target-config"


def test_an_error_of_the_file_keeps_its_traceback(train: str) -> None:
    Path("broken.py").write_text("def f(mesh): ...\n\nraise RuntimeError('in the file')\n")
    report = rehearsal_program._report(RehearsalRequest("broken.py", "f", "cpu:4", 1, None, {}))
    assert report.lines == (
        "broken.py cannot be imported:",
        "Traceback (most recent call last):",
        f'  File "{Path.cwd()}/broken.py", line 3, in <module>',
        "    raise RuntimeError('in the file')",
        "RuntimeError: in the file",
    )


def report(peak: int, traffic: dict[str, tuple[int | None, int]], **about: Any) -> RehearsalReport:
    sent = (
        gda.AxisTraffic((*axes.split("+"),), 1, nbytes, slow)
        for axes, (nbytes, slow) in traffic.items()
    )
    about = {"fits": True, "num_devices": 8, "device_kind": "TPU v5 lite", **about}
    about = {"capacity_bytes": 1 << 34, "peak_bytes": peak, **about, "traffic": (*sent,)}
    return RehearsalReport(dataclasses.replace(rehearsal(), **about))


@functools.cache
def rehearsal() -> gda.Rehearsal:
    return gda.rehearse(lambda x: x + 1, np.zeros(8, np.float32))


@pytest.fixture
def canned(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, RehearsalReport]], None]:
    """Has these reports, by the size of the axis ``a``."""

    def use(reports: dict[int, RehearsalReport]) -> None:
        def made(given: list[RehearsalRequest]) -> Iterator[tuple[int, RehearsalReport]]:
            yield from ((at, reports[of.mesh["a"]]) for at, of in enumerate(given))

        monkeypatch.setattr(rehearsal_processes, "reports_of", made)

    return use


def test_the_best_mesh_is_the_first(run: Run, train: str, canned: Callable[..., None]) -> None:
    reports = {
        1: report(1 << 35, {}, fits=False),
        2: report(1 << 20, {"a": (3 << 20, 1 << 20), "b": (1 << 20, 0)}),
        4: report(1 << 21, {"a+b": (5 << 20, 0)}),
        8: report(1 << 22, {"b": (None, 0)}),
    }
    canned(reports)
    command = "rehearse", f"{train}:rehearsal", "--topology", "v5e:2x4", "--mesh"
    code, out, _ = run(*command, "a,b", "--search")
    assert (code, out) == (
        0,
        "train.py:rehearsal on 8 x TPU v5 lite with 16.0 GiB each; bytes are those of one device\n"
        "\n"
        "mesh     fits      peak   over a   over b  over a, b  over slow links\n"
        "a=4,b=2  yes    2.0 MiB      0 B      0 B    5.0 MiB              0 B\n"
        "a=2,b=4  yes    1.0 MiB  3.0 MiB  1.0 MiB        0 B          1.0 MiB\n"
        "a=8,b=1  yes    4.0 MiB      0 B        ?        0 B              0 B\n"
        "a=1,b=8  no    32.0 GiB\n",
    )
    documents = json.loads(run(*command, "a=1,b=8;a=4,b=2", "--json")[1])
    assert [each["mesh"] for each in documents] == [{"a": 4, "b": 2}, {"a": 1, "b": 8}]
    assert run(*command, "a=1,b=8")[0] == 1


def test_a_mesh_whose_devices_repeat_the_work_is_not_the_first(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    def timed(flops: float, seconds: float) -> RehearsalReport:
        traffic = {"a": (1 << 24, 0)} if flops < 8e12 else {}
        step = gda.StepSeconds(compute=seconds / 2, estimate=seconds)
        return report(1 << 20, traffic, flops=flops, flops_total=8e12, seconds=step)

    reports = {1: timed(8e12, 40.6e-3), 2: timed(4e12, 21e-3), 8: timed(1e12, 6e-3)}
    canned(reports)
    meshes = "--topology", "v5e:2x4", "--mesh", "a=8,b=1; a=1,b=8; a=2,b=4"
    out = run.printed("rehearse", f"{train}:rehearsal", *meshes)
    assert out.splitlines()[2:] == [
        "mesh     fits     peak    about            range    over a",
        "a=8,b=1  yes   1.0 MiB   6.0 ms    6.0 to 9.0 ms  16.0 MiB",
        "a=2,b=4  yes   1.0 MiB  21.0 ms  21.0 to 31.5 ms  16.0 MiB",
        "a=1,b=8  yes   1.0 MiB  40.6 ms  40.6 to 60.9 ms       0 B",
        "",
        "measured steps of v5e took 1 to 1.5 times the estimate: 2 steps",
        "",
        "a=2,b=4: devices repeat work: each product is computed 4 times on average",
        "a=1,b=8: all 8 devices compute the same batch: no product is shared",
    ]
    # Without speeds, the work that devices repeat counts before what they send.
    for each in reports.values():
        object.__setattr__(each.rehearsal, "seconds", gda.StepSeconds())
    out = run.printed("rehearse", f"{train}:rehearsal", *meshes)
    assert [line.split()[0] for line in out.splitlines()[3:6]] == ["a=8,b=1", "a=2,b=4", "a=1,b=8"]


def test_meshes_that_do_not_fit_come_last_the_nearest_to_fitting_first(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    def large(peak: int, capacity: int, seconds: float) -> RehearsalReport:
        step = gda.StepSeconds(estimate=seconds)
        return report(peak << 30, {}, fits=False, capacity_bytes=capacity << 30, seconds=step)

    reports = {1: large(40, 16, 1e-3), 2: large(20, 16, 3e-3), 4: large(30, 28, 4e-3)}
    canned({**reports, 8: report(1 << 20, {}, seconds=gda.StepSeconds(estimate=5e-3))})
    search = "--topology", "v5e:2x4", "--mesh", "a,b", "--search"
    rows = table_of(run.printed("rehearse", f"{train}:rehearsal", *search))
    assert [row[0] for row in rows[1:]] == ["a=8,b=1", "a=4,b=2", "a=2,b=4", "a=1,b=8"]


def test_what_tells_meshes_of_nearly_one_time_apart_is_told(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    def timed(peak: int, slow: int, seconds: float, **about: Any) -> RehearsalReport:
        step = gda.StepSeconds(estimate=seconds)
        return report(peak << 30, {"a": (1 << 35, slow << 30)}, seconds=step, **about)

    reports = {8: timed(5, 9, 1.0), 4: timed(3, 7, 1.01), 2: timed(4, 2, 1.04), 1: timed(1, 1, 1.1)}
    canned(reports)
    search = "--topology", "v5e:2x4", "--mesh", "a,b", "--search"
    out = run.printed("rehearse", f"{train}:rehearsal", *search)
    assert out.splitlines()[-1] == (
        "the first 3 are within 5%, less than estimates are right to: a=2,b=4 sends least over "
        "slow links (2.0 GiB) and a=4,b=2 has the lowest peak (3.0 GiB)"
    )
    canned({**reports, 2: timed(2, 2, 1.04)})
    merits = "a=2,b=4 sends least over slow links (2.0 GiB) and has the lowest peak (2.0 GiB)"
    assert run.printed("rehearse", f"{train}:rehearsal", *search).endswith(f"to: {merits}\n")
    canned({**reports, 4: timed(3, 7, 1.06), 2: timed(4, 2, 0.99, fits=False)})
    assert "within" not in run.printed("rehearse", f"{train}:rehearsal", *search)


def test_the_first_mesh_has_advice_and_others_share_a_line(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    state = gda.ArgumentBytes("state", (8, 2), "float32", 1 << 29, is_donated=False)
    undonated = {"arguments": (state._replace(could_be_donated=True),), "undonated_bytes": 1 << 29}
    twice = {"flops": 2e12, "flops_total": 8e12}
    canned({1: report(1 << 30, {}, **undonated), 2: report(1 << 31, {}, **twice)})
    command = "rehearse", f"{train}:rehearsal", "--topology", "v5e:2x4", "--mesh"
    out = run.printed(*command, "a=1,b=8; a=2,b=4; a=2,b=2,c=2")
    assert out.splitlines()[-3:] == [
        "a=1,b=8, to save time or memory: donate state (512.0 MiB) by jax.jit(…, "
        "donate_argnums=…), since results have the same shapes: saves 512.0 MiB",
        "",
        "a=2,b=4; a=2,b=2,c=2: devices repeat work: each product is computed 2 times on average",
    ]


def test_reasons_that_differ_in_numbers_alone_are_one_row_with_a_sentence(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    def failed(size: int) -> RehearsalReport:
        reason = f"ValueError: P('a') on {{'a': {size}}}: 6 is not divisible by {size}. Specs: P()."
        return RehearsalReport(reason=reason, lines=[reason])

    other = RehearsalReport(reason="TypeError: 8", lines=["TypeError: 8"])
    canned({1: report(1 << 30, {}), 2: other, 4: failed(4), 8: failed(8)})
    search = "--topology", "v5e:2x4", "--mesh", "a,b", "--search"
    out = run.printed("rehearse", f"{train}:rehearsal", *search)
    assert out.splitlines()[5:] == [
        "no rehearsal  reason",
        "a=2,b=4       TypeError: 8",
        "a=4,b=2       ValueError: P('a') on {'a': 4}: 6 is not divisible by 4; also a=8,",
        "              b=1",
        "for a traceback: --mesh a=2,b=4 alone",
    ]


def test_the_picture_of_one_mesh_is_written(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    event = TimelineEvent("compute", "train.py:7", begin=0.0, seconds=1e-3, takes=1e-3)
    step = gda.StepSeconds(estimate=1e-3, timeline=Timeline((event,)))
    canned({1: report(1024, {}, seconds=step), 2: report(1024, {})})
    command = "rehearse", f"{train}:rehearsal", "--topology", "cpu:2", "--trace", "step.json"
    assert run(*command, "--mesh", "a=1")[0] == 0
    (product,) = [
        each
        for each in json.loads(Path("step.json").read_text())["traceEvents"]
        if each["ph"] == "X"
    ]
    assert (product["name"], product["ts"], product["dur"]) == ("train.py:7", 0, 1000)
    code, out, err = run(*command, "--mesh", "a=2")
    assert (code, "fits" in out) == (2, True)
    assert "--trace: <lambda> has no timeline to save" in " ".join(err.split())


def test_a_first_mesh_that_is_far_from_its_work_is_told_with_lines(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    def timed(seconds: float, *arrays: gda.Temporary) -> RehearsalReport:
        places = gda.PlaceSeconds("train.py:9", 2.5, 0, 0.0), gda.PlaceSeconds("", 0.5, 0, 0.0)
        parts = gda.StepSeconds(compute=1.0, memory=1.5, estimate=seconds, places=places)
        about = {"seconds": parts, "temporaries": arrays, "flops": 8.0, "flops_total": 64.0}
        w = gda.ArgumentBytes("w", (4, 1, 8192, 64), "bfloat16", 1, is_donated=True)
        return report(2**30, {}, **about, arguments=(w,), num_devices=8)

    def array(blocks: int, nbytes: int = 2**28, whole: tuple[int, ...] = (64, 8192)) -> Any:
        shape = whole[0] // blocks, whole[1]
        return gda.Temporary("bfloat16", shape, nbytes, "", "train.py", 7, whole)

    command = "rehearse", f"{train}:rehearsal", "--topology", "cpu:2", "--mesh", "a,b", "--search"
    longest = "; longest: train.py:9 2.5 s"
    largest = f"{longest}; the largest results that are not sharded over all: train.py:7 [64,8192]"
    for seconds, of, words in (
        (3.0, array(1), f"{largest}: none of 8"),
        (3.0, array(4), f"{largest}: 4 of 8"),
        (3.0, array(8), f"{longest}\n"),
        (3.0, array(1, nbytes=2**20), f"{longest}\n"),  # to shard a thousandth of it saves nothing
        (3.0, array(1, whole=(8192, 64)), f"{longest}\n"),  # w of a layer, which was gathered
        (1.5, array(1), ""),
    ):
        canned({1: timed(seconds, of), 2: timed(5.0, array(1))})
        _, out, _ = run(*command)
        far = (
            "a=1,b=2 is the fastest of these: of 3.0 s its products need 1.0 s, if 8 devices share"
        )
        far += " them, and its memory traffic 1.5 s"
        assert (f"{far}{words}" in out) == bool(words)
        assert ("its products need" in out) == bool(words)


def test_a_time_that_lacks_work_is_a_bound_and_comes_last(
    run: Run, train: str, canned: Callable[..., None]
) -> None:
    lacks = gda.StepSeconds(estimate=2e-3, not_counted=("the products of the kernel f",))
    reports = {
        1: report(1 << 20, {}, seconds=lacks),
        2: report(1 << 20, {}, seconds=gda.StepSeconds(estimate=5e-3)),
        8: report(1 << 35, {}, fits=False),
    }
    canned(reports)
    command = "rehearse", f"{train}:rehearsal", "--topology", "v5e:2x4"
    meshes = "--mesh", "a=1,b=8; a=8,b=1; a=2,b=4"
    assert run.printed(*command, *meshes).splitlines()[2:] == [
        "mesh     fits      peak     about          range",
        "a=2,b=4  yes    1.0 MiB    5.0 ms  5.0 to 7.5 ms",
        "a=1,b=8  yes    1.0 MiB  ≥ 2.0 ms",
        "a=8,b=1  no    32.0 GiB",
        "",
        "measured steps of v5e took 1 to 1.5 times the estimate: 2 steps",
        "",
        "a=1,b=8: not counted: the products of the kernel f",
    ]
    documents = json.loads(run.printed(*command, *meshes, "--json"))
    shown = [(each["seconds"]["text"], each["seconds"]["is_bound"]) for each in documents]
    assert shown == [("5.0 ms", False), ("≥ 2.0 ms", True), ("?", False)]


def table_of(out: str) -> list[list[str]]:
    """Return the cells of the first table, between two or more spaces."""
    blocks = out.split("\n\n")
    return [re.split("  +", line) for line in blocks[1].splitlines()]


def test_several_topologies_are_sorted_by_the_cost_of_a_million(
    run: Run, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_topology = {
        "v5e:2x2": report(1 << 20, {"a": (1 << 20, 0)}, num_devices=4),
        "h100:4": report(1 << 20, {}, num_devices=4, device_kind="NVIDIA H100", capacity_bytes=9),
    }
    seconds = {"v5e:2x2": 4.0, "h100:4": 1.0}
    array = gda.Temporary("bfloat16", (32, 8192), 2**20, "", "train.py", 7, (64, 8192))

    def made(given: list[RehearsalRequest]) -> Iterator[tuple[int, RehearsalReport]]:
        for at, of in enumerate(given):
            rehearsed = of_topology[of.topology].rehearsal
            assert rehearsed
            has_all = of.topology == "v5e:2x2" or of.mesh["a"] == 4
            step = gda.StepSeconds(
                estimate=seconds[of.topology] * of.mesh["a"],
                mfu=0.5 if has_all else None,
                not_counted=() if has_all else ("the products of the kernel f",),
            )
            about = {"seconds": step, "examples": of.examples, "price": of.price}
            about["temporaries"] = (array,)
            yield at, RehearsalReport(dataclasses.replace(rehearsed, **about))

    monkeypatch.setattr(rehearsal_processes, "reports_of", made)
    monkeypatch.setenv("COLUMNS", "200")
    command = "rehearse", f"{train}:rehearsal", "--topology", "v5e:2x2", "--topology", "h100:4"
    meshes = "--mesh", "a=4,b=1; a=2,b=2"
    out = run.printed(*command, *meshes, "--examples", "1000", "--price", "1", "--price", "h100=9")
    assert out.splitlines()[:3] == [
        "train.py:rehearsal; bytes are those of one device",
        "h100:4: 4 x NVIDIA H100 with 9 B each",
        "v5e:2x2: 4 x TPU v5 lite with 16.0 GiB each",
    ]
    assert [" ".join(row) for row in table_of(out)] == [
        "topology mesh fits peak about examples/s per million range MFU over a activations",
        "v5e:2x2 a=2,b=2 yes 1.0 MiB 8.0 s 125 8.89 8.0 to 12.0 s 50% 1.0 MiB 2 of 4",
        "v5e:2x2 a=4,b=1 yes 1.0 MiB 16.0 s 62.5 17.8 16.0 to 24.0 s 50% 1.0 MiB 2 of 4",
        "h100:4 a=4,b=1 yes 1.0 MiB 4.0 s 250 40 50% 0 B 2 of 4",
        "h100:4 a=2,b=2 yes 1.0 MiB ≥ 2.0 s ≤ 500 ≥ 20 0 B 2 of 4",
    ]
    assert "\nh100:4: no measured step of such devices is known, to compare estimates with\n" in out
    assert "\nh100:4 a=2,b=2: not counted: the products of the kernel f\n" in out
    documents = json.loads(run.printed(*command, *meshes, "--json", "--price", "h100=9"))
    assert [(each["topology"], each["cost"]) for each in documents] == [
        *(("h100:4", 0.04), ("v5e:2x2", None), ("v5e:2x2", None), ("h100:4", 0.02))
    ]
    assert (documents[0]["activation_blocks"], documents[0]["cost_per_million"]) == (2, None)
    # Without prices the time decides; a narrow terminal gets two tables.
    monkeypatch.setenv("COLUMNS", "60")
    out = run.printed(*command, *meshes)
    assert [row[0] for row in table_of(out)[1:]] == ["h100:4", "v5e:2x2", "v5e:2x2", "h100:4"]
    assert out.split("\n\n")[2].split()[:4] == ["topology", "mesh", "MFU", "over"]


def test_the_smallest_topology_that_fits_is_found(
    run: Run, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = gda.ArgumentBytes("w", (10 << 30,), "int8", 10 << 30, is_donated=False)
    asked: list[str] = []

    def made(given: list[RehearsalRequest]) -> Iterator[tuple[int, RehearsalReport]]:
        asked.append(given[0].topology)
        for at, of in enumerate(given):
            about = {"num_devices": num_devices_of(of.topology), "arguments": (w,)}
            fits = of.topology == "v5e:4x4" and of.mesh["b"] == 1
            yield at, report(1 << 30, {}, fits=fits, capacity_bytes=2 << 30, **about)

    monkeypatch.setattr(rehearsal_processes, "reports_of", made)
    search = "--mesh", "a,b", "--search"
    out = run.printed("rehearse", f"{train}:rehearsal", "--topology", "v5e:auto", *search)
    assert asked == ["v5e:1x1", "v5e:2x4", "v5e:4x4"]  # 10 GiB need 5 devices with 2 GiB
    assert out.endswith("v5e:4x4 is the smallest v5e that fits; too small: v5e:1x1 and v5e:2x4\n")
    assert table_of(out)[1][:2] == ["a=16,b=1", "yes"]


def test_ctrl_c_prints_the_table_of_what_is_done(
    run: Run, train: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(given: list[RehearsalRequest]) -> Iterator[tuple[int, RehearsalReport]]:
        yield 1, report(1 << 20, {})
        raise KeyboardInterrupt

    monkeypatch.setattr(rehearsal_processes, "reports_of", made)
    command = "rehearse", f"{train}:rehearsal", "--topology", "v5e:2x2", "--mesh", "a,b"
    code, out, _ = run(*command, "--search")
    assert code == 130
    assert table_of(out) == [["mesh", "fits", "peak"], ["a=2,b=2", "yes", "1.0 MiB"]]


def test_costs_of_kernels_reach_the_rehearsal(run: Run, train: str) -> None:
    mesh = "--topology", "cpu:4", "--mesh", "data=2,model=2"
    said = run.refusal("rehearse", f"{train}:rehearsal", *mesh, "--cost", "my=kernel=2e9")
    assert "costs has 'my=kernel', which is no kernel of step" in " ".join(said.split())


def test_the_free_memory_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rehearsal_processes, "_CGROUP", tmp_path)
    monkeypatch.setattr(rehearsal_processes, "_BYTES_OF_ONE", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(8)})
    (tmp_path / "memory.current").write_text("5500\n")
    (tmp_path / "memory.stat").write_text("anon 4500\nfile 1000\ninactive_file 1000\n")
    for written, processes in [("max\n", 8), ("7500\n", 3), ("5000\n", 1)]:
        (tmp_path / "memory.max").write_text(written)
        assert rehearsal_processes.most_processes() == processes


def test_interrupted(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, time\npathlib.Path(f'{os.getpid()}.pid').touch()\ntime.sleep(1000)\n"
    )
    mesh = "--topology", "cpu:4", "--mesh", "x=4"
    command = [sys.executable, "-m", "gda", "rehearse", "slow.py:f", *mesh]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        while not (found := [*tmp_path.glob("*.pid")]) and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert (process.returncode, out, err) == (130, b"", b"")
    wait_until_gone([int(file.stem) for file in found])


@pytest.mark.topology
def test_tpus_that_are_not_here(run: Run, train: str) -> None:
    topology = "--topology", "v5e:2x4", "--mesh"
    _, out, _ = run("rehearse", f"{train}:large", *topology, "data,model", "--search")
    table = out.partition("\n\n")[2].partition("\n\n")[0]
    assert [line.split()[:2] for line in table.splitlines()[1:]] == [
        ["data=8,model=1", "yes"],
        ["data=4,model=2", "yes"],
        ["data=2,model=4", "yes"],
        ["data=1,model=8", "no"],
    ]
    assert run("rehearse", f"{train}:large", *topology, "data=1,model=8")[0] == 1
    code, _, err = run("rehearse", f"{train}:large", "--topology", "v5x:2x4", "--mesh", "data=8")
    assert code == 2
    assert err.startswith("gda: libtpu has no topology v5x:2x4: ")


@pytest.mark.topology
def test_only_the_program_writes_to_stderr(train: str) -> None:
    slices = "--topology", "v5e:2x4", "--num-slices", "2", "--mesh", "data=16,model=1"
    command = [sys.executable, "-m", "gda", "rehearse", f"{train}:rehearsal", *slices]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "a line of the program\n")
    assert done.stdout.startswith("step on 16 x TPU v5 lite, mesh data=16,model=1: fits\n")
