"""Trees that one program offers and another pulls: ``gda.offer`` and ``gda.pull``.

Provisional: see ``docs/stable.md``.

Read in this order: ``catalog`` (the description of an offer); ``versions``, ``serving`` and
``offering``, of the program that offers; ``pieces``, ``asking`` and ``pulling``. The messages are
those of ``gda.arrays.transport.connection``, and ``docs/design/two-programs.md`` has the protocol
and its reasons.
"""
