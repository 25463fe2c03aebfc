"""The decode kernel in NKI, a strict NKI simulator on NumPy, and plain references: plain arrays in and out.

Start with `gk_kernels.simulator` (how a kernel runs on a machine without a Neuron device).
"""
