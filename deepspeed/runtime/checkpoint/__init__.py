"""Checkpoints in DeepSpeed's file layout: no copy in memory, any number of ranks."""
