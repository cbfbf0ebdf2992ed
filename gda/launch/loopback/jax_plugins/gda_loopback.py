"""A plugin of JAX, which calls ``initialize`` before it makes its devices.

JAX looks for plugins in the namespace ``jax_plugins``.
``gda.launch.children.listen_on_loopback`` puts the folder on the path.
"""

from gda.launch.children import LOOPBACK
from gda.multihost.coordination import listen_on


def initialize() -> None:
    listen_on(LOOPBACK)
