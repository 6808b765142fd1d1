"""A pretend disk: one journal of named logs; a crash loses or tears what was not yet durable."""

from __future__ import annotations

import struct
import zlib
from random import Random

_FRAME = struct.Struct(">III")
"""Length of the name, length of the record, checksum of both."""


class Disk:
    """Records of one peer. Survives its crashes; only ``crash`` takes bytes away."""

    def __init__(self) -> None:
        self._journal = bytearray()
        self._durable = 0

    def append(self, log: str, record: bytes) -> None:
        """Write a record; durable from the next ``sync`` on."""
        name = log.encode()
        self._journal += _FRAME.pack(len(name), len(record), zlib.crc32(name + record))
        self._journal += name + record

    @property
    def dirty(self) -> bool:
        """Whether something written is not yet durable."""
        return self._durable < len(self._journal)

    def sync(self) -> None:
        """Make everything written so far durable."""
        self._durable = len(self._journal)

    def crash(self, random: Random) -> None:
        """Keep what is durable and a random number of the bytes written after it."""
        kept = random.randint(self._durable, len(self._journal))
        del self._journal[kept:]

    def read(self) -> dict[str, list[bytes]]:
        """All whole records by log, in order; a torn last one is cut off."""
        logs: dict[str, list[bytes]] = {}
        at = 0
        while at + _FRAME.size <= len(self._journal):
            name_size, size, checksum = _FRAME.unpack_from(self._journal, at)
            start = at + _FRAME.size
            end = start + name_size + size
            body = bytes(self._journal[start:end])
            if end > len(self._journal) or zlib.crc32(body) != checksum:
                break
            logs.setdefault(body[:name_size].decode(), []).append(body[name_size:])
            at = end
        del self._journal[at:]
        self._durable = len(self._journal)
        return logs
