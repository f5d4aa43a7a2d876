"""The version of this package: the DeepSpeed release whose surface it offers, then its own number."""

__version__ = "0.19.8+lean.0.1.0"
