"""One of two processes on one accelerator: a line of JSON for each thing that it did.

The processes are those of one program, each with one device. NCCL refuses two devices that are one
GPU, so what communicates on the devices comes last.
"""

import json
import sys
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gda
import gda.launch

gda.launch.initialize()
folder = sys.argv[1]
mesh = Mesh(np.array(jax.devices()), ("x",))
data = np.arange(64, dtype=np.float32).reshape(8, 8)
me = jax.process_index()
mine = data[4 * me : 4 * me + 4]
built: list[gda.GlobalArray] = []


def holds_its_part(g: gda.GlobalArray) -> None:
    (shard,) = g.local_shards
    assert shard.index[0] == slice(4 * me, 4 * me + 4)
    assert np.array_equal(shard.data, mine)
    built.append(g)


def restored() -> None:
    tree = gda.checkpoint.restore(f"{folder}/run", mesh=mesh, specs=P("x"))
    holds_its_part(tree["w"])


def pulled() -> None:
    with gda.offer({"w": built[0]}) as offer:
        holds_its_part(gda.pull(offer.address, mesh, P("x"))["w"])
        gda.check_processes_agree({}, name="pulled")


def resharded() -> None:
    columns = built[0].reshard(P(None, "x")).local_data(0)
    assert np.array_equal(columns, data[:, 4 * me : 4 * me + 4])


make = gda.GlobalArray
steps: dict[str, Callable[[], object]] = {
    "devices": lambda: [str(device) for device in jax.devices()],
    "platform": lambda: jax.devices()[0].platform,
    "from_callback": lambda: holds_its_part(
        make.from_callback(data.shape, mesh, P("x"), lambda index: data[index])
    ),
    "from_source": lambda: holds_its_part(make.from_source(data, mesh, P("x"))),
    "from_process_local": lambda: holds_its_part(make.from_process_local(mine, mesh, P("x"))),
    "buffers": lambda: holds_its_part(
        make(data.shape, mesh, P("x"), [jax.device_put(mine, jax.local_devices()[0])])
    ),
    "check_processes_agree": lambda: gda.check_processes_agree({"w": built[0]}),
    "save": lambda: gda.checkpoint.save(f"{folder}/run", {"w": built[0]}),
    "restore": restored,
    "offer and pull": pulled,
    "communicates: fingerprint": lambda: gda.fingerprint(built[0]),
    "communicates: gather": lambda: bool((built[0].gather() == data).all()),
    "communicates: reshard": resharded,
    "communicates: a sum in jit": lambda: float(jax.jit(lambda x: x.array.sum())(built[0])),
}
for name, step in steps.items():
    print(json.dumps({"step": name, "state": "began"}), flush=True)
    try:
        value = step()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:400]
        print(json.dumps({"step": name, "state": "failed", "value": said}), flush=True)
        if "communicates" in name:
            break  # the others would wait in vain
    else:
        print(json.dumps({"step": name, "state": "done", "value": value}), flush=True)
