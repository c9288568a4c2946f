"""optrun: train transformers with the optimizer you mean."""

__version__ = "0.1.0"
