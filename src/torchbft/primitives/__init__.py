"""Nouns shared by all rooms: ids, fault model, digests, keys, wire, evidence, effects, traces."""
