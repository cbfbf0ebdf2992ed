"""The facts that only the trace of a function has: whole shapes, loops, estimates of kernels.

Read in this order: ``flops`` (operations, and the equations of a trace), ``whole_shapes`` (of
temporaries), ``scanned_caches`` (arrays that a loop copies).
"""
