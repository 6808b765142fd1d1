"""Train one PyTorch model across machines that do not trust each other."""

__version__ = "0.1.0"
