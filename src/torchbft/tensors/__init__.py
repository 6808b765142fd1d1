"""Pure functions on tensors: exact arithmetic, aggregation, compression and model state."""
