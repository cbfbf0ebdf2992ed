"""The communication of a compiled program, read from its text: no JAX, no devices.

XLA prints an optimised program (an *HLO module*) as computations, each a list of instructions, one
a line. A collective is an instruction. It stands in the entry or in a computation that is called:
the body of a loop, a branch, a fusion, the wrapped half of an asynchronous operation.

The one confusing rule: the numbers in replica groups are not device ids. They are positions among
the devices that the program was compiled for, which for ``jax.jit`` is the device order of the
mesh. So the groups of a mesh ``{'x': 2, 'y': 4}`` along ``'y'`` are ``{{0,1,2,3},{4,5,6,7}}``,
whichever devices it has and in whichever order.

Read in this order: ``instructions`` (the text), ``groups`` and ``loops``, ``source_lines`` (of user
code), ``program`` (a text that is parsed once, and one collective), ``listing`` (totals and tables
of collectives), ``products`` and ``memory_traffic`` (of each instruction), ``schedule`` (its steps
in their order, with the work of each, and its collectives); ``allocations`` (the largest
temporaries), ``live_ranges`` (those of each instruction).
"""

from gda.compiled.hlo.listing import Axes as Axes
from gda.compiled.hlo.listing import Collectives as Collectives
from gda.compiled.hlo.listing import Traffic as Traffic
from gda.compiled.hlo.listing import format_axes as format_axes
from gda.compiled.hlo.listing import format_line as format_line
from gda.compiled.hlo.listing import format_size as format_size
from gda.compiled.hlo.listing import format_source as format_source
from gda.compiled.hlo.listing import summed as summed
from gda.compiled.hlo.program import KINDS as KINDS
from gda.compiled.hlo.program import Collective as Collective
from gda.compiled.hlo.program import Module as Module
from gda.compiled.hlo.program import ProgramMesh as ProgramMesh
from gda.compiled.hlo.program import modules_of as modules_of
from gda.compiled.hlo.program import num_devices as num_devices
from gda.compiled.hlo.schedule import Schedule as Schedule
from gda.compiled.hlo.schedule import Step as Step
from gda.compiled.hlo.schedule import executions as executions
from gda.compiled.hlo.schedule import read_collectives as read_collectives
from gda.compiled.hlo.schedule import read_schedule as read_schedule
