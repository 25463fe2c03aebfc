"""The giga kernel: the whole GPT-OSS decoder stack of one decode step, in NKI, one call for all layers.

Read in this order: `entry` (the one kernel), `layer` (its body), then a part each: `norms`, `qkv`, `gather`,
`attention`, `kv_write`, `projection`, `router`, `experts` / `experts_mx`, `collectives`; `tiles` holds what they
share and `config` what is known at compile time. `gk_kernels.reference` has the NumPy definition of each part under
the same name, and docs/giga-kernel.md follows one token through them.

Dims: R rows (tokens) of a replica, T rows of this rank (R / TP), N rows of all replicas, Hp padded hidden, q / kv
heads of this rank, d head size, E experts, X experts of this rank, Ip padded intermediate.

The modules import nki: load them inside `gk_kernels.simulator.simulated_nki()` or beside the real package. All that
this project has seen of the kernel, it saw in its own simulator; nothing here has run on a device.
"""
