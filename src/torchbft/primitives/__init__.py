"""Nouns shared by all rooms: identifiers, the fault model, digests, keys, wire, evidence, traces."""
