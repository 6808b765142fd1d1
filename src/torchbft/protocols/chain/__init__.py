"""A chain that CometBFT ordered, checked without CometBFT. Read ``checks.py`` first."""
