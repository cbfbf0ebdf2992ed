"""JAX calls ``initialize`` before it makes its devices, in processes with the folder on their path.

``jax_plugins`` is the namespace in which JAX looks for modules that prepare its backends.
``gda.launch.children.listen_on_loopback`` puts the folder on the path.
"""

from gda.launch.children import LOOPBACK
from gda.multihost.coordination import listen_on


def initialize() -> None:
    listen_on(LOOPBACK)
