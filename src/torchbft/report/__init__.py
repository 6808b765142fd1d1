"""Reads traces and ledgers: terminal, HTML report, offline verifier."""
