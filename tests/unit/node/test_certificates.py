"""Mutual TLS from the roster alone, checked without sockets: who is let in, and who is not."""

from __future__ import annotations

import datetime
import ssl
import tempfile

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from torchbft.node.transports.certificates import (
    certificate,
    client_context,
    raw_public,
    server_context,
)
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey

SERVICE = "service/1"
KEYS = {name: SigningKey.derive(bytes(32), name) for name in "abm"}
ROSTER = {PeerId(name): KEYS[name].public for name in "ab"}


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> tuple[bytes | None, str | None]:
    """Run a handshake in memory; the public key the server sees, and the chosen service."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    mine = client.wrap_bio(to_client, to_server, server_hostname="torchbft")
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(4):
        for side in (mine, theirs):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert mine.version() == theirs.version() == "TLSv1.3"
    assert raw_public(mine.getpeercert(True)) == KEYS["b"].public
    return raw_public(theirs.getpeercert(True)), theirs.selected_alpn_protocol()


def server() -> ssl.SSLContext:
    return server_context(PeerId("b"), KEYS["b"], ROSTER, [SERVICE])


def test_members_prove_their_keys_to_each_other() -> None:
    client = client_context(PeerId("a"), KEYS["a"], ROSTER, SERVICE)
    assert handshake(client, server()) == (KEYS["a"].public, SERVICE)


def test_a_certificate_is_a_pure_function_of_name_and_key() -> None:
    first = certificate(PeerId("a"), KEYS["a"].public)
    certificate.cache_clear()
    assert certificate(PeerId("a"), KEYS["a"].public) == first
    assert raw_public(first) == KEYS["a"].public
    parsed = x509.load_der_x509_certificate(first)
    assert parsed.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
    assert certificate(PeerId("b"), KEYS["a"].public) != first
    assert certificate(PeerId("a"), KEYS["b"].public) != first


@pytest.mark.parametrize("name", ["m", "a"])
def test_a_key_outside_the_roster_is_refused_under_any_name(name: str) -> None:
    client = client_context(PeerId(name), KEYS["m"], ROSTER, SERVICE)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, server())


def test_a_listener_outside_the_roster_is_refused() -> None:
    impostor = server_context(PeerId("b"), KEYS["m"], ROSTER, [SERVICE])
    client = client_context(PeerId("a"), KEYS["a"], ROSTER, SERVICE)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, impostor)


def signed_by(
    issuer: SigningKey, issuer_name: str, name: str, holder: SigningKey
) -> ssl.SSLContext:
    """A client that shows a certificate for ``holder`` in ``name``, signed by any key."""

    def common(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    made = (
        x509.CertificateBuilder()
        .subject_name(common(name))
        .issuer_name(common(issuer_name))
        .serial_number(7)
        .public_key(Ed25519PublicKey.from_public_bytes(holder.public))
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .sign(Ed25519PrivateKey.from_private_bytes(issuer.seed()), None)
    )
    key = Ed25519PrivateKey.from_private_bytes(holder.seed())
    context = client_context(PeerId("a"), KEYS["a"], ROSTER, SERVICE)
    with tempfile.NamedTemporaryFile() as file:
        file.write(made.public_bytes(Encoding.PEM))
        file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        file.flush()
        context.load_cert_chain(file.name)
    return context


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("issuer", "issuer_name", "name", "holder"),
    [
        ("a", "a", "b", "m"),  # a member signs a stranger's key in another member's name
        ("a", "a", "a", "m"),  # ... or in its own
        ("m", "m", "m", "m"),  # self-signed by a stranger
        ("m", "torchbft roster", "a", "m"),  # with the right issuer's name
        ("a", "a", "a", "a"),  # a member's own key in a certificate that is not *the* one
    ],
)
def test_no_member_and_no_stranger_can_make_a_certificate_that_is_accepted(
    issuer: str, issuer_name: str, name: str, holder: str
) -> None:
    client = signed_by(KEYS[issuer], issuer_name, name, KEYS[holder])
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(client, server())


def test_without_a_certificate_nobody_comes_in() -> None:
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError):
        handshake(client, server())


def test_older_tls_is_not_spoken() -> None:
    client = client_context(PeerId("a"), KEYS["a"], ROSTER, SERVICE)
    client.minimum_version = client.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        handshake(client, server())


def test_what_is_no_certificate_of_ours_has_no_key() -> None:
    assert raw_public(None) is None
