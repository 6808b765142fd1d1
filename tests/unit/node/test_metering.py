"""Counting bytes, and allowances."""

from __future__ import annotations

import socket

import pytest

from torchbft.node.transports import metering
from torchbft.node.transports.metering import Allowance, Meter, Plane, Traffic


def pair() -> tuple[socket.socket, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    server.close()
    return client, accepted


def receive(sock: socket.socket, count: int) -> None:
    while count:
        count -= len(sock.recv(count))


def test_the_kernel_counts_the_stream_and_the_total_outlives_the_socket() -> None:
    client, accepted = pair()
    meter = Meter()
    ours = meter.opened(Plane.PAYLOAD, client)
    client.sendall(b"x" * 5000)
    accepted.sendall(b"y" * 70)
    receive(accepted, 5000)
    receive(client, 70)
    assert meter.total(Plane.PAYLOAD) == Traffic(5000, 70)
    assert meter.total(Plane.CONTROL) == Traffic()
    client.sendall(b"x" * 11)
    ours.wrote(11)
    client.close()
    assert meter.total(Plane.PAYLOAD) == Traffic(5011, 70), "what was handed over since counts"
    meter.closed(Plane.PAYLOAD, ours)
    meter.closed(Plane.PAYLOAD, ours)
    assert meter.total(Plane.PAYLOAD) == Traffic(5011, 70)
    accepted.close()


def test_where_the_kernel_does_not_tell_bytes_handed_over_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metering, "_TCP_INFO", None)
    client, accepted = pair()
    meter = Meter()
    ours = meter.opened(Plane.CONTROL, client)
    ours.wrote(30)
    ours.read(4)
    assert meter.total(Plane.CONTROL) == Traffic(30, 4)
    assert meter.source == "bytes handed to the transport"
    client.close()
    accepted.close()


def test_congestion_control_is_told_and_set() -> None:
    client, accepted = pair()
    assert metering.set_congestion(client, "reno")
    assert metering.congestion_of(client) == "reno"
    assert not metering.set_congestion(client, "no-such-control")
    client.close()
    accepted.close()
    assert metering.congestion_of(client) == "unknown"
    assert not metering.set_congestion(client, "reno")


def test_an_allowance_saves_up_to_its_burst_and_names_the_wait() -> None:
    allowance = Allowance(rate=10, burst=100)
    assert allowance.spend(100, now=0.0) == 0
    assert allowance.spend(5, now=0.0) == pytest.approx(0.5)
    assert allowance.spend(5, now=1.0) == 0
    assert allowance.spend(100, now=1000.0) == 0, "a long silence saves no more than the burst"
    assert allowance.spend(1, now=1000.0) == pytest.approx(0.1)


def test_what_is_permitted_may_make_a_debt_and_a_debt_permits_nothing() -> None:
    allowance = Allowance(rate=10, burst=100)
    assert allowance.permits(1000, now=0.0), "any size, once"
    assert not allowance.permits(1, now=0.0)
    assert not allowance.permits(1, now=89.0), "a refusal adds nothing to the debt"
    assert allowance.permits(1, now=90.1)
