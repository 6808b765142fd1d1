"""Attacks on tensors: what a liar puts in the place of its honest update."""
