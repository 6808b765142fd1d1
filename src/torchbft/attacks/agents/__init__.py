"""Attacks on protocols: a peer that follows most of the protocol and breaks one part of it."""
