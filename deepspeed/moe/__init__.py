"""Mixture of experts with expert parallelism, which is not here."""
