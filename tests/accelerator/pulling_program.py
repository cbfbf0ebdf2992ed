"""Pull a tree onto the accelerator and onto CPU devices, then offer it in turn until stdin ends."""

import json
import sys

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from on_accelerator import is_stand_in

import gda

card = jax.devices("cpu")[0] if is_stand_in() else jax.devices()[0]
meshes = {
    "the card": Mesh(np.array([[card]]), ("x", "y")),
    "CPU devices": Mesh(np.array(jax.devices("cpu")[4:8]).reshape(2, 2), ("x", "y")),
}
told = {"platform": card.platform}
trees = {}
for name, mesh in meshes.items():
    tree = gda.pull(sys.argv[1], mesh, P("x"), plain=True)
    told[name] = {
        "fingerprints": gda.fingerprint(tree),
        "devices": sorted(str(device) for device in tree["w"].devices()),
    }
    trees[name] = tree
with gda.offer(trees["the card"]) as offer:
    print(json.dumps({**told, "address": offer.address}), flush=True)
    sys.stdin.read()
