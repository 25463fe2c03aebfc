"""The `gk` command."""
