"""Activation checkpointing on top of torch.utils.checkpoint."""
