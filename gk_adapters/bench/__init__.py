"""Benchmarks of the KV transfer, each against a peer that is measured in the same run. `form` is their common form."""
