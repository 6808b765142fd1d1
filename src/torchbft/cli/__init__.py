"""Commands. Data goes to stdout, words to stderr; every command takes ``--json``."""
