"""One round on the ledger: ROUND.md as a pure reader, and the machine that sends its part."""
