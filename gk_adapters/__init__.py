"""Adapters: one outside system per module or sub-package, the fakes, and the command line."""
