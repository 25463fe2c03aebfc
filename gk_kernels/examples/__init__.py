"""Ten worked kernels, smallest first; each shows one idea and is checked against NumPy.

`catalogue.EXAMPLES` lists them with inputs and expected outputs; docs/simulator.md walks through them.
The kernel modules import nki, so load them inside `gk_kernels.simulator` or beside the real package.
"""
