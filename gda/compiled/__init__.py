"""A compiled function: its communication and its memory, on devices that need not be here.

Provisional: see ``docs/stable.md``.

Read in this order: ``devices`` (kinds of them, and their speeds), ``hlo`` (the text of a compiled
program), both without JAX; ``programs`` (a call,
traced, lowered or compiled), ``communication_rules`` (what is allowed), ``collectives``
(``gda.collectives`` and ``gda.assert_collectives``); ``topologies`` (``gda.rehearsal_mesh``),
``abstract`` (``gda.abstract``), ``traces``, ``torus``, ``collective_times``, ``device_clock`` and
``seconds``, ``rehearsal_facts`` (the fields of a rehearsal), ``report`` (its text, advice and
picture), ``changes`` (those from a golden file), ``checkpoint_interval``, ``rehearsal`` (all of
them as one object) and ``rehearse`` (``gda.rehearse`` and ``gda.assert_fits``).
"""
