"""The embedded ledger; ``machine.py`` begins with its specification."""
