"""The communication of a compiled program, read from its text: no JAX, no devices.

XLA prints an optimised program (an *HLO module*) as computations, each a list of instructions, one
a line. A collective is an instruction. It stands in the entry or in a computation that is called:
the body of a loop, a branch, a fusion, the wrapped half of an asynchronous operation.

The one confusing rule: the numbers in replica groups are not device ids. They are positions among
the devices that the program was compiled for, which for ``jax.jit`` is the device order of the
mesh. So the groups of a mesh ``{'x': 2, 'y': 4}`` along ``'y'`` are ``{{0,1,2,3},{4,5,6,7}}``,
whichever devices it has and in whichever order.
"""

from gda.compiled.hlo.listing import (
    Axes,
    Collectives,
    Traffic,
    format_axes,
    format_size,
    format_source,
    sentence,
    summed,
)
from gda.compiled.hlo.program import KINDS, Collective, num_devices, read_collectives

__all__ = [
    "KINDS",
    "Axes",
    "Collective",
    "Collectives",
    "Traffic",
    "format_axes",
    "format_size",
    "format_source",
    "num_devices",
    "read_collectives",
    "sentence",
    "summed",
]
