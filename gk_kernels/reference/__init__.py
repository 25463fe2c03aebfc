"""NumPy definitions of what the giga kernel's parts compute, one file per part, under the same names.

Plain and slow: float32 throughout, one formula a line, no tiles. Hidden axes are in whatever order the caller has them;
only `experts` knows the stored orders, since they decide what an MX group is.
"""
