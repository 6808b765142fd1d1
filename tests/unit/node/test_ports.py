"""Addresses as people write them (C30)."""

from __future__ import annotations

import os
import socket

import pytest

from torchbft.node.transports.ports import format_address, holder_of, parse_address
from torchbft.primitives.errors import ConfigError

GOOD = {
    "127.0.0.1:7700": ("127.0.0.1", 7700),
    "[::1]:7700": ("::1", 7700),
    "[::]:0": ("::", 0),
    "[fe80::1%eth0]:65535": ("fe80::1%eth0", 65535),
    "clinic-c.example:7700": ("clinic-c.example", 7700),
    ":7700": ("", 7700),
    "*:7700": ("*", 7700),
}


@pytest.mark.parametrize("text", GOOD)
def test_c30_addresses_are_read_and_written_back(text: str) -> None:
    host, port = parse_address(text)
    assert (host, port) == GOOD[text]
    assert format_address(host, port) == text


@pytest.mark.parametrize(
    "text", ["", "7700", "::1:7700", "[::1]", "[::1]7700", "host:", "host:x", "host:65536", "a:1:2"]
)
def test_c30_what_is_not_an_address_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match="is not an address") as refused:
        parse_address(text)
    assert "[::1]:7700" in refused.value.hint


def test_the_holder_of_a_port_is_found_and_a_free_port_has_none() -> None:
    for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            sock = socket.socket(family)
            sock.bind((host, 0))
        except OSError:
            assert family == socket.AF_INET6, "a machine may lack IPv6"
            continue
        port = sock.getsockname()[1]
        assert holder_of(port) is None, "bound is not yet listening"
        sock.listen()
        assert (holder_of(port) or "").startswith(f"process {os.getpid()} (")
        sock.close()
        assert holder_of(port) is None
