"""`python -m gda.launch`, in a forked process that forks the others; a few real starts.

With JAX's own defaults a process that fails, hangs or comes late holds up the others for 99 seconds
or 5 minutes. Each run here gets at most 200 seconds, many times its need.
"""

import gzip
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from textwrap import dedent

import pytest
import running
from running import (
    LOOPBACK,
    ignoring,
    is_running,
    launch,
    python,
    wait_for,
    wait_until_gone,
)

import gda.launch
from gda.launch.__main__ import main
from gda.launch.children import Children, Port, environment, has_collective_timeout
from gda.launch.output import Lines, Log
from gda.testing.forking import Forked

LIMIT_SECONDS = 200

Program = Callable[[str], str]
Done = subprocess.CompletedProcess[str]

CLUSTERS = re.compile(r"JAX_COORD|JAX_NUM|JAX_PROC|GDA_|SLURM|OMPI|KUBERNETES|PMI|XLA_FLAGS")
LAUNCHER = [sys.executable, "-m", "gda.launch"]


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Writes a program, which knows its number as RANK, to a file, and returns the path."""

    def write(text: str) -> str:
        path = tmp_path / "program.py"
        prelude = "import os, sys, time\nRANK = int(os.environ.get('JAX_PROCESS_ID', -1))\n"
        path.write_text(prelude + dedent(text))
        return str(path)

    return write


def start(command: list[str], cwd: Path | None = None) -> subprocess.Popen[str]:
    """Start a launcher as a user does, without the variables of one process of many."""
    return subprocess.Popen(
        command,
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if not CLUSTERS.match(name)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def after_the_last_reason(stderr: str) -> str:
    """The words of the launcher about the end, after its last prefix."""
    return stderr[stderr.rindex("gda.launch: ") :]


# Programs that use JAX.

SUM = """
    import jax, jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec as P

    def total():
        mesh = jax.make_mesh((jax.device_count(),), ("x",))
        sharding = NamedSharding(mesh, P("x"))
        shape = (jax.device_count(),)
        x = jax.make_array_from_callback(shape, sharding, lambda i: jnp.arange(shape[0])[i])
        return int(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(x))
"""

BY_GDA = """
    import gda.launch
    gda.launch.initialize()
"""

BY_JAX = """
    import jax
    jax.distributed.initialize(
        os.environ["JAX_COORDINATOR_ADDRESS"],
        int(os.environ["JAX_NUM_PROCESSES"]),
        int(os.environ["JAX_PROCESS_ID"]),
    )
"""


def test_processes_sum_over_all_devices(program: Program) -> None:
    path = program(BY_GDA + SUM + "    print(jax.local_device_count(), 'each:', total())\n")
    done = launch("-n", 2, "--devices-per-process", 2, path)
    assert done.returncode == 0, done.stderr
    for process in range(2):
        assert f"[{process}] 2 each: {sum(range(4))}\n" in done.stdout


def test_a_program_that_forgot_to_initialize_is_told(program: Program) -> None:
    done = launch("-n", "2", program("import gda\ngda.check_processes_agree(0)"))
    assert done.returncode == 1
    assert "call gda.launch.initialize() before any other use of JAX" in done.stderr


def test_the_end_of_a_process_ends_those_that_wait_for_it_in_a_collective(program: Program) -> None:
    ending = """
    total()
    if RANK == 0:
        os.kill(os.getpid(), 9)
    while True:
        total()
    """
    done = launch("-n", 2, "--heartbeat-timeout", 20, program(BY_GDA + SUM + ending))
    assert done.returncode == 128 + 9
    reason = "gda.launch: process 0 was killed by SIGKILL\n"
    assert after_the_last_reason(done.stderr).startswith(reason)


# Programs that end while a collective is under way. JAX alone waits for it in vain, in more than
# half of the runs.

MOVE = """
    import gda, jax, numpy as np
    from jax.sharding import Mesh, PartitionSpec as P
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    mesh = Mesh(devices, ("x", "y"))
    g = gda.GlobalArray.from_callback((8, 8), mesh, P("x"), lambda i: np.ones((8, 8))[i])
    g.gather()
    r = g.reshard(P("y"))
"""

# One device of each process computes, which is not the same thing in XLA.
MULTIPLY = """
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
    devices = np.array(jax.devices()).reshape(jax.process_count(), -1)
    mesh = Mesh(devices[:, 0], ("x",))
    ones, whole = np.ones((4096, 512), np.float32), NamedSharding(mesh, P())
    x = jax.make_array_from_callback(ones.shape, NamedSharding(mesh, P("x")), lambda i: ones[i])
    r = jax.jit(lambda x: (x @ x[:512]).sum(0), out_shardings=whole)(x)
"""

DONE = """
    print(f"done {time.time()}\\n", end="")  # in one piece, between those that Gloo writes
"""


def start_alone(program: str, processes: int, devices: int) -> tuple[int, str, str]:
    """Without the launcher, as one would do it by hand: the largest code, and the outputs."""
    times = {f"{name}_timeout": 60 for name in ("heartbeat", "collective", "agreement")}
    with (
        closing(Port()) as port,
        Children() as children,
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
    ):
        started = [
            children.start(
                "forked_program:run",
                program,
                popen=Forked,
                env=environment(index, processes, port.number, devices, **times),
                stdin=out.fileno(),
                stdout=out.fileno(),
                stderr=err.fileno(),
            )
            for index in range(processes)
        ]
        code = max((process.wait(LIMIT_SECONDS) for process in started), key=abs)
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read()


@pytest.mark.parametrize(
    "seed", [3] + [pytest.param(seed, marks=pytest.mark.torture) for seed in range(54) if seed != 3]
)
def test_a_pending_collective_does_not_hold_up_the_end(program: Program, seed: int) -> None:
    draw = random.Random(seed)
    is_alone = seed % 4 == 3
    initialize = BY_GDA if is_alone else draw.choice([BY_GDA, BY_JAX])
    pending = MOVE if is_alone else draw.choice([MOVE, MOVE, MULTIPLY])
    path = program(initialize + pending + draw.choice(["", "    del r\n"]) + DONE)
    processes, devices = draw.choice([(4, 2), (4, 2), (2, 4)])
    if is_alone:
        code, output, errors = start_alone(path, processes, devices)
    else:
        options = ["-n", str(processes), "--devices-per-process", str(devices)]
        with start([*LAUNCHER, *options, path]) as process:
            output, errors = process.communicate(timeout=LIMIT_SECONDS)
            code = process.returncode
    took = time.time() - max(map(float, re.findall(r"done (\S+)", output)), default=0)
    assert (code, errors) == (0, "")
    assert output.count("done") == processes
    assert took < 60  # JAX would wait for 100 s and more


LEFT = """
    import atexit, ctypes, gzip
    import jaxlib

    text = open("text", "w")
    text.write("kept")
    packed = gzip.open("packed", "wt")
    packed.write("kept")
    ctypes.CDLL(None).printf(b"by C\\n")
    atexit.register(print, "at exit")
    def uses():
        return text, packed
"""


def test_nothing_that_was_written_is_lost(program: Program, tmp_path: Path) -> None:
    with start([*LAUNCHER, "-n", "1", program(LEFT)], cwd=tmp_path) as process:
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert (process.returncode, errors) == (0, "")
    lines = ["at exit", "by C"]
    assert sorted(output.splitlines()) == sorted(f"[0] {line}" for line in lines)
    assert (tmp_path / "text").read_text() == "kept"
    with gzip.open(tmp_path / "packed", "rt") as packed:
        assert packed.read() == "kept"


def test_processes_that_do_not_exit_are_ended(program: Program) -> None:
    path = program("""
    import atexit
    def stuck_here():
        open(f"ready{RANK}", "w").close()
        time.sleep(300)
    if RANK:
        atexit.register(stuck_here)
    """)
    done = launch("-n", "3", path, how="launch_impatiently", cwd=Path(path).parent)
    assert done.returncode == 0
    assert done.stderr.count("in stuck_here\n") == 2
    assert done.stderr.endswith(
        "gda.launch: the program succeeded in all processes, but processes 1, 2 did not exit "
        "within 4 s and was ended; an exit handler of the program or of JAX blocked; "
        "the stacks of the processes are shown above\n"
    )


def test_threads_of_a_program_are_waited_for(program: Program) -> None:
    path = program("""
    import threading
    def work():
        open(f"ready{RANK}", "w").close()
        time.sleep(5)
        print("worked")
    threading.Thread(target=work).start()
    """)
    done = launch("-n", "1", path, how="launch_impatiently", cwd=Path(path).parent)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0] worked\n", "")


def test_a_save_that_failed_unheard_fails_the_program(program: Program, tmp_path: Path) -> None:
    path = program(f"""
    import gda, numpy as np
    from gda.storage.stores.directory import FileStore
    def fail(*_):
        time.sleep(1)
        raise OSError("the disk is full")
    FileStore.write = fail
    pending = gda.checkpoint.save_async({str(tmp_path / "run")!r}, {{"w": np.ones(8)}})
    if sys.argv[1:]:
        try:
            pending.result()
        except OSError:
            print("heard")
    """)
    done = launch("-n", "1", path)
    assert done.returncode == 1
    reason, *rest = after_the_last_reason(done.stderr).splitlines()
    assert reason == "gda.launch: process 0 failed with exit code 1"
    assert rest[-1].endswith("the disk is full; the program did not call result() of it")
    done = launch("-n", "1", path, "hear")
    assert (done.returncode, done.stdout) == (0, "[0] heard\n")


# The address on which processes listen.

LISTENS = f"""
    sys.path.insert(0, {str(Path(running.__file__).parent)!r})
    from running import addresses_listened_on
    print(*(f"listens {{each}}\\n" for each in addresses_listened_on()), sep="")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_depends_on_the_name_of_the_machine(program: Program) -> None:
    path = program(BY_JAX + SUM + "    print('sum', total())\n" + LISTENS)
    done = launch("-n", 2, path, how="launch_without_address")
    if "cannot be changed" in done.stderr:
        pytest.skip(done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("] sum 1\n") == 2
    addresses = re.findall(r"listens (\w+)", done.stdout)
    assert len(addresses) >= 3  # gloo in both processes, the coordination service
    assert set(addresses) <= LOOPBACK


# The environment of the processes, and their output.


def test_a_script_runs_as_python_runs_it(program: Program, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("")
    path = program("import beside; print(__name__, __file__, sys.argv, sys.path[0])")
    arguments = ["-n", "5", "--timeout", "--", "-m"]  # which reach it untouched
    done = launch("-n", "1", path, *arguments)
    said = f"[0] __main__ {path} {[path, *arguments]} {tmp_path.resolve()}\n"
    assert done.stdout == said, done.stderr


def test_a_module_runs_as_python_runs_it_and_the_launcher_imports_no_jax(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    main = package / "__main__.py"
    main.write_text("import sys; print(__name__, __package__, sys.argv, 'jax' in sys.modules)")
    done = subprocess.run(
        [*LAUNCHER, "-n", "1", "-m", "package", "-m", "x"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"[0] __main__ package {[str(main), '-m', 'x']} False\n", done.stderr


def test_streams_stay_apart_and_no_byte_of_a_flood_is_lost(program: Program) -> None:
    path = program("""
    for number in range(500):
        print("out", number, "x" * 50)
        print("err", number, "y" * 50, file=sys.stderr)
    sys.stdout.buffer.write(b"\\xff" * 300_000 + b"\\n")
    print("no end of line", end="")
    """)
    done = launch("-n", "3", path)
    assert done.returncode == 0
    for text, word, filling in [(done.stdout, "out", "x"), (done.stderr, "err", "y")]:
        for rank in range(3):
            lines = [line[4:] for line in text.splitlines() if line.startswith(f"[{rank}] {word}")]
            assert lines == [f"{word} {number} {filling * 50}" for number in range(500)]
    assert done.stdout.count("\udcff") == 900_000
    assert done.stdout.count("] no end of line\n") == 3


@pytest.mark.parametrize(
    ("line", "is_shown"),
    [
        (b"[Gloo] Rank 0 is connected to 3 peer ranks. ", False),
        (b"[Gloo] Rank [Gloo] Rank 3 is connected to 12 is connected to 3 peer ranks. ", False),
        (b"3 peer ranks. Expected number of connected peer ranks is : 3", False),
        (b"3", True),
        (b"loss 3 [Gloo] Rank 1", True),
    ],
)
def test_connection_messages_of_gloo_are_omitted(line: bytes, is_shown: bool) -> None:
    with open(os.devnull, "rb") as pipe:
        lines = Lines(pipe, "[0] ", 1)
    assert lines.take(line + b"\n") == (b"[0] " + line + b"\n" if is_shown else b"")


def test_a_message_of_gloo_within_a_line_is_omitted() -> None:
    of_one = b"[Gloo] Rank 1 is connected to 3 peer ranks. "
    of_one += b"Expected number of connected peer ranks is : 3"
    with open(os.devnull, "rb") as pipe:
        lines = Lines(pipe, "[0] ", 1)
    assert lines.take(b"sum " + of_one) == b""
    assert lines.take(of_one + b"\n\n8.0\nmore\n") == b"[0] sum 8.0\n[0] more\n"


def test_a_progress_bar_is_shown_while_it_moves() -> None:
    with open(os.devnull, "rb") as pipe:
        lines = Lines(pipe, "[0] ", 1)
    shown = [lines.take(data) for data in (b"a\r\nb\n\r 1%", b"\r 2", b"%\r 3%", b"\n", b"done\r")]
    assert shown == [b"[0] a\r\n[0] b\n", b"[0]  1%\r", b"[0]  2%\r", b"[0]  3%\n", b"[0] done\r"]
    assert lines.take(b"\nc\n\n") == b"\n[0] c\n[0] \n"
    lines.take(b"".join(b"\r %d%%" % number for number in range(100)))
    assert b"[0] c\n" in lines.last()  # a bar is one line
    assert lines.end() == b"[0]  99%\n"


def test_a_reader_that_goes_away_ends_the_run(program: Program) -> None:
    path = program("""
    for _ in range(3000):
        print("line")
        time.sleep(0.1)
    """)
    with start([*LAUNCHER, "-n", "1", path]) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "[0] line\n"
        process.stdout.close()
        assert process.wait(LIMIT_SECONDS) == 128 + signal.SIGPIPE
        assert "the output can no longer be written" in process.stderr.read()


# The end of a run.


@pytest.mark.parametrize(
    ("end", "code", "reason", "last_lines"),
    [
        ("print('sorry', file=sys.stderr); sys.exit(7)", 7, "failed with exit code 7", ["sorry"]),
        ("sys.exit('no such data')", 1, "failed with exit code 1", ["no such data"]),
        ("os._exit(3)", 3, "failed with exit code 3", []),
        (
            "[print('step', i, file=sys.stderr) for i in range(100)]; os.kill(os.getpid(), 9)",
            128 + signal.SIGKILL,
            "was killed by SIGKILL",
            [f"step {number}" for number in range(70, 100)],
        ),
    ],
    ids=["exit code", "message", "without a word", "kill"],
)
def test_reason_of_the_end_comes_with_the_last_lines(
    program: Program, end: str, code: int, reason: str, last_lines: list[str]
) -> None:
    done = launch("-n", "2", program(f"if RANK == 1: {end}\ntime.sleep(300)"))
    assert done.returncode == code
    lines = [f"gda.launch: process 1 {reason}", *[f"[1] {line}" for line in last_lines]]
    assert after_the_last_reason(done.stderr).splitlines() == lines


def test_a_good_end_is_0_and_prefixes_of_many_processes_are_aligned(program: Program) -> None:
    path = program("print('here'); [sys.exit, lambda: sys.exit(0), lambda: None][RANK % 3]()")
    done = launch("-n", "11", path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank:2}] here" for rank in range(11))


def test_the_traceback_shows_the_program_only(program: Program) -> None:
    path = program("""
    import atexit
    atexit.register(time.sleep, 300)  # which is not waited for
    def work():
        raise ValueError("boom \\udcff")
    work()
    """)
    done = launch("-n", "1", path)
    assert done.returncode == 1
    assert re.findall(r'File "(.*)", line', done.stderr) == [path, path]
    assert done.stderr.endswith("ValueError: boom \\udcff\n")


def test_the_first_failure_comes_last_and_the_others_before(program: Program) -> None:
    path = program("""
    import signal
    def fail(*_):
        raise KeyError("\u5c42" * 60_000 + "consequence")
    signal.signal(signal.SIGTERM, fail)
    if RANK == 0:
        open("ready", "w").close()
        time.sleep(300)
    while not os.path.exists("ready"):
        time.sleep(0.02)
    raise ValueError("cause")
    """)
    done = launch("-n", "2", path, how="launch_patiently", cwd=Path(path).parent)
    assert done.returncode == 1
    assert "[0] […]\n[0] \u5c42\u5c42" in done.stderr  # as much as a pipe holds
    assert "\u5c42consequence'\n" in done.stderr
    reason, *rest = after_the_last_reason(done.stderr).splitlines()
    assert reason == "gda.launch: process 1 failed with exit code 1"
    assert rest[-1] == "ValueError: cause"


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_all(program: Program, tmp_path: Path, number: int, code: int) -> None:
    path = program("""
    import signal
    if RANK == 0:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while not os.path.exists("ready"):
            time.sleep(0.02)
        pid = open("ready").read()
        print(os.getpid(), pid, flush=True)
        while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGINT)  # the second, or it would wait for the grace
        time.sleep(300)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with open("pid", "w") as file:
            file.write(str(os.getpid()))
        os.rename("pid", "ready")
        time.sleep(300)
    finally:
        print("cleaned up")
    """)
    words = ["-n", 2, "--grace", 3000, path]
    done = launch(*words, cwd=tmp_path, interrupt_after="\n", interrupt_with=number)
    assert done.returncode == code
    pids, cleaned_up = done.stdout.splitlines()
    assert cleaned_up == "[1] cleaned up"
    assert done.stderr.endswith(
        f"gda.launch: stopped by {signal.Signals(number).name}; process 0 had not ended and was "
        "killed (see --grace)\n"
    )
    assert not any(is_running(int(pid)) for pid in pids.split()[1:])


def test_a_process_that_ignores_a_signal_is_killed_after_the_grace(program: Program) -> None:
    path = program("""
    import signal
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(300)
    """)
    done = launch("-n", 1, "--grace", 1, path)
    assert done.returncode == 143
    assert "stopped by SIGTERM; process 0 had not ended and was killed (see --grace)" in done.stderr


@pytest.mark.parametrize("code", [0, 75])
def test_after_a_signal_the_exit_code_is_that_of_the_processes(
    program: Program, tmp_path: Path, code: int
) -> None:
    path = program(f"""
    import signal
    def end(*_):
        time.sleep(3)  # longer than the others may take after a failure
        print("saved", flush=True)
        sys.exit({code})
    signal.signal(signal.SIGTERM, end)
    open(f"ready{{RANK}}", "w").close()
    if RANK == 0:
        while not os.path.exists("ready1"):
            time.sleep(0.02)
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(300)
    """)
    done = launch("-n", "2", path, cwd=tmp_path)
    assert done.returncode == code
    assert sorted(done.stdout.splitlines()) == ["[0] saved", "[1] saved"]
    assert done.stderr == "gda.launch: stopped by SIGTERM\n"


def test_signals_ignored_on_entry(program: Program, tmp_path: Path) -> None:
    path = program(f"""
    import pathlib, signal
    print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN, flush=True)
    pathlib.Path({str(tmp_path)!r}, "here").touch()
    while not os.path.exists({str(tmp_path / "go on")!r}):
        time.sleep(0.02)
    print("after SIGHUP", flush=True)
    pathlib.Path({str(tmp_path)!r}, "there").touch()
    time.sleep(300)
    """)
    with start(ignoring([*LAUNCHER, "-n", "1", path])) as process:
        wait_for([tmp_path / "here"])
        process.send_signal(signal.SIGHUP)  # as nohup wants it, nothing happens
        (tmp_path / "go on").touch()
        wait_for([tmp_path / "there"])
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=LIMIT_SECONDS)
    assert process.returncode == 130
    assert output == "[0] True\n[0] True\n[0] after SIGHUP\n"
    assert errors.endswith("gda.launch: stopped by SIGINT\n")


def test_no_process_outlives_a_launcher_that_is_killed(program: Program, tmp_path: Path) -> None:
    path = program(f"""
    import signal, subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    own = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    with open(f"{tmp_path}/pid{{RANK}}.tmp", "w") as file:
        print(os.getpid(), own.pid, file=file)
    os.rename(f"{tmp_path}/pid{{RANK}}.tmp", f"{tmp_path}/pid{{RANK}}")
    time.sleep(300)
    """)
    pid_files = [tmp_path / "pid0", tmp_path / "pid1"]
    with start([*LAUNCHER, "-n", "2", path]) as process:
        wait_for(pid_files)
        pids = [int(pid) for path in pid_files for pid in path.read_text().split()]
        assert all(is_running(pid) for pid in pids)
        process.kill()
        process.communicate(timeout=LIMIT_SECONDS)
    wait_until_gone(pids)


# Another start after a failure.

COUNTED = """
    from pathlib import Path
    starts = Path(__file__).with_name("starts")
    if RANK == 1:
        with starts.open("a") as file:
            file.write("x")
        print("output of", RANK, flush=True)
    else:
        time.sleep(60)
"""


def starts_of(path: str) -> int:
    """The number of starts of a program that counts them."""
    return len(Path(path).with_name("starts").read_text())


def test_a_program_starts_again_until_it_succeeds(program: Program, tmp_path: Path) -> None:
    path = program(
        """
        from pathlib import Path
        failures = Path(__file__).with_name("failures")
        print("output of", RANK, flush=True)
        if not failures.exists() or len(failures.read_text()) < 2:
            if RANK == 0:
                time.sleep(60)
            with failures.open("a") as file:
                file.write("x")
            sys.exit("broken")
        """
    )
    logs = tmp_path / "new" / "logs"
    done = launch("-n", 2, "--restarts", 3, "--logs", logs, path)
    assert done.returncode == 0
    said = [line for line in done.stderr.splitlines() if line.startswith("gda.launch: ")]
    failed = "process 1 failed with exit code 1"
    assert said == [
        f"gda.launch: start 1 of 4: {failed}",
        "gda.launch: start 2 of 4 is in 1 s",
        f"gda.launch: start 2 of 4: {failed}",
        "gda.launch: start 3 of 4 is in 2 s",
    ]
    written = {file.name: file.read_text() for file in sorted(logs.iterdir())}
    assert written == {
        "start1.process0.log": "output of 0\n",
        "start1.process1.log": "output of 1\nbroken\n",
        "start2.process0.log": "output of 0\n",
        "start2.process1.log": "output of 1\nbroken\n",
        "start3.process0.log": "output of 0\n",
        "start3.process1.log": "output of 1\n",
    }


@pytest.mark.parametrize(("code", "starts"), [(3, 2), (75, 1)])
def test_last_start_gives_the_exit_code(program: Program, code: int, starts: int) -> None:
    path = program(f"{COUNTED}    sys.exit({code})\n")
    done = launch("-n", 2, "--restarts", 1, path)
    assert done.returncode == code
    assert starts_of(path) == starts


def test_no_start_after_a_signal_in_the_pause(program: Program) -> None:
    path = program(f"{COUNTED}    sys.exit(3)\n")
    with start([*LAUNCHER, "-n", "2", "--restarts", "5", path]) as launcher:
        assert launcher.stderr is not None
        while " is in 1 s" not in (line := launcher.stderr.readline()):
            assert line, "ended"
        launcher.send_signal(signal.SIGTERM)
        assert "stopped by a signal; the program does not start again" in launcher.stderr.read()
    assert launcher.returncode == 3
    assert starts_of(path) == 1


def test_no_start_after_a_signal_while_processes_end(program: Program) -> None:
    path = program(
        f"""
    import signal
    from pathlib import Path
    ready = Path(__file__).with_name("ready")
    if RANK == 0:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGTERM))
        ready.touch()
    while not ready.exists():
        time.sleep(0.02)
    {COUNTED}    sys.exit(3)
        """
    )
    done = launch("-n", 2, "--restarts", 5, path)
    assert done.returncode == 3
    assert starts_of(path) == 1


def test_a_log_that_is_full_is_named_once(tmp_path: Path) -> None:
    read, written = os.pipe()
    os.close(written)
    with open(read, "rb") as pipe, closing(Log("/dev/full")) as log:
        lines = Lines(pipe, "[0] ", 1, log)
        told = b"gda.launch: no more is written to /dev/full: [Errno 28] No space left on device\n"
        assert lines.take(b"first\n") == told + b"[0] first\n"
        assert lines.take(b"second\n") == b"[0] second\n"


def test_time_limit_shows_stacks(program: Program) -> None:
    path = program("""
    import signal
    def stuck_here():
        open(f"ready{RANK}", "w").close()
        time.sleep(300)
    if RANK == 1:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if RANK == 2:
        sys.exit()
    stuck_here()
    """)
    words = ["-n", 3, "--timeout", 1, path]
    done = launch(*words, how="launch_impatiently", cwd=Path(path).parent)
    assert done.returncode == 124
    assert re.search(r"^\[0\] .*in stuck_here$", done.stderr, re.M)
    assert done.stderr.endswith(
        "gda.launch: not done after 1 s; the stacks of the processes are shown above\n"
    )


@pytest.mark.skipif(
    not has_collective_timeout(), reason="before JAX 0.10, XLA waits 30 s, which no option changes"
)
def test_a_collective_that_waited_in_vain_names_the_option(program: Program) -> None:
    ending = """
    gda.check_processes_agree(0)  # so that both begin at once
    total()
    if RANK == 1:
        time.sleep(1000)  # as if it compiled
    total()
    """
    done = launch("-n", "2", "--collective-timeout", "10", program(BY_GDA + SUM + ending))
    assert done.returncode == 1
    reason = after_the_last_reason(done.stderr).splitlines()[0]
    assert reason == (
        "gda.launch: process 0 failed with exit code 1: a collective waited in vain for another "
        "process. If that takes longer, such as to compile, give a longer "
        "--collective-timeout, or call gda.check_processes_agree before the collective; the stacks "
        "of the processes are shown above"
    )


# Mistakes in the command.


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ("-n 0 program.py", "argument -n/--num-processes: '0' is not a positive integer"),
        ("program.py", "the following arguments are required: -n/--num-processes"),
        ("-n 2", "no program was given; give a script, or -m and a module"),
        (
            "-n 2 --devices_per_process=2 a.py",
            "unrecognized arguments: --devices_per_process=2; did you mean --devices-per-process?",
        ),
    ],
)
def test_a_wrong_command_has_a_reason(
    args: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(args.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith(f"\ngda.launch: error: {complaint}\n")


def test_initialize_without_variables_names_the_launcher() -> None:
    done = python("-c", "import gda.launch; gda.launch.initialize()")
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("ValueError: the number of processes is not known")
    assert "python -m gda.launch -n 4 program.py" in error
    assert "JAX_COORDINATOR_ADDRESS" in error


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing in this process says that it is one of many; sets variables for a test."""
    for name in os.environ:
        if CLUSTERS.match(name):
            monkeypatch.delenv(name)
    return monkeypatch


def test_initialize_prefers_arguments_to_variables(no_variables: pytest.MonkeyPatch) -> None:
    calls = []
    no_variables.setattr("jax.distributed.initialize", lambda **options: calls.append(options))
    gda.launch.initialize(initialization_timeout=5)
    gda.launch.initialize("host:1", process_id=0)
    no_variables.setenv("JAX_COORDINATOR_ADDRESS", "127.0.0.1:1")
    no_variables.setenv("JAX_NUM_PROCESSES", "4")
    no_variables.setenv("JAX_PROCESS_ID", "3")
    no_variables.setenv("GDA_HEARTBEAT_TIMEOUT_SECONDS", "10")
    gda.launch.initialize()
    gda.launch.initialize(process_id=0, heartbeat_timeout_seconds=20)
    others = {"coordinator_address": "127.0.0.1:1", "num_processes": 4}
    assert calls == [
        {"initialization_timeout": 5},
        {"coordinator_address": "host:1", "process_id": 0},
        {**others, "process_id": 3, "heartbeat_timeout_seconds": 10},
        {**others, "process_id": 0, "heartbeat_timeout_seconds": 20},
    ]
