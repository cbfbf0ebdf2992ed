"""Processes that meet, agree and gather.

In this order: ``coordination`` (the only access to JAX's coordination service), ``allgather``,
``descriptions`` (arrays as text to compare), ``background`` (work in a thread), ``places`` (where
each process is, and which have ended), ``meeting`` (each brings a payload, one decides), ``steps``
(all succeed, or all raise), ``failure_watch`` (work on devices that fails in all), ``agreement``
(all have the same arrays, and make the same calls), ``shared_folders`` (all see the same files),
``ending`` (a signal to one reaches all).
"""
