"""Processes that meet, agree and gather.

Read in this order: ``coordination`` (the only access to JAX's coordination service, which JAX does
not export), ``settings`` (those of JAX under which gda computes), ``allgather`` (bytes to every
process), ``descriptions`` (arrays as text to compare),
``background`` (work in a thread, for a caller that looks around), ``places`` (where each process
is, and which have ended), ``meeting`` (each brings a payload, one decides), ``steps`` (all do it,
or all hear the reason), ``failure_watch`` (work on devices, in which the failure of one process
ends the others too), ``agreement`` (checks that all processes have the same arrays, and make the
same calls; ``communicates`` for what fails before that), ``ending`` (a signal in one process is the
same answer in all), ``fault_report`` (versions and devices).
"""
