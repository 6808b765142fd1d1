"""Keys: one strict rule, nothing secret in a log, files that only their owner reads."""

import pickle
from pathlib import Path

import pytest

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.keys import SigningKey, load_key, save_key, verify

KEY = SigningKey(bytes(range(32)))


def test_a_signature_binds_key_domain_and_body() -> None:
    signature = KEY.sign("a", b"body")
    assert verify(KEY.public, "a", b"body", signature)
    assert not verify(KEY.public, "b", b"body", signature)
    assert not verify(KEY.public, "a", b"Body", signature)
    assert not verify(SigningKey.generate().public, "a", b"body", signature)


def test_signing_again_gives_the_same_bytes() -> None:
    assert KEY.sign("a", b"x") == KEY.sign("a", b"x")


@pytest.mark.parametrize("signature", [b"", b"\0" * 64, b"\xff" * 64, b"x" * 63, b"x" * 65])
@pytest.mark.parametrize("public", [b"", b"\0" * 32, b"\xff" * 32, KEY.public])
def test_verify_is_total(public: bytes, signature: bytes) -> None:
    assert verify(public, "a", b"x", signature) is False


def test_small_order_keys_are_refused() -> None:
    # With A the identity, R = S·B with S = 0 passes a lax check for every message.
    identity = b"\x01" + b"\0" * 31
    assert not verify(identity, "a", b"x", identity + b"\0" * 32)


def test_a_signature_with_s_plus_l_is_refused() -> None:
    order = 2**252 + 27742317777372353535851937790883648493
    good = KEY.sign("a", b"x")
    moved = (int.from_bytes(good[32:], "little") + order).to_bytes(32, "little")
    assert not verify(KEY.public, "a", b"x", good[:32] + moved)


def test_a_secret_is_neither_shown_nor_pickled() -> None:
    assert KEY.seed().hex()[:16] not in repr(KEY)
    with pytest.raises(TypeError):
        pickle.dumps(KEY)


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    save_key(path, KEY)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path).public == KEY.public
    with pytest.raises(ConfigError, match="already there"):
        save_key(path, KEY)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="open to other users"):
        load_key(path)


def test_key_files_that_are_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_key(tmp_path / "none")
    path = tmp_path / "bad"
    path.touch(mode=0o600)
    path.write_text("zz")
    with pytest.raises(ConfigError, match="not a key file"):
        load_key(path)
