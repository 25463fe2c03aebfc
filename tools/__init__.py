"""Programs that make and convert the shipped checkpoint; not part of the distribution."""
