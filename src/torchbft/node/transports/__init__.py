"""Sockets between members: one authenticated port, control messages and payloads apart."""
