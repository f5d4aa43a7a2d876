"""Sequence parallelism, which is not here."""
