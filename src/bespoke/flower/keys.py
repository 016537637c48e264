"""A client's key and a server's certificates, as files."""

import datetime
import ipaddress
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from bespoke.errors import UserError, shown
from bespoke.files import make_folder, write_atomic, write_error

_YEARS = 2  # that certificates are valid
CA, CERTIFICATE, KEY = "ca.crt", "server.crt", "server.key"


def make_key(path: Path) -> str:
    """Write a new private key, and the public one beside it as ``.pub``; return the public key as one line."""
    private = ec.generate_private_key(ec.SECP384R1())
    text, public = public_line(private.public_key()), path.with_name(f"{path.name}.pub")
    if os.path.lexists(public):
        raise UserError(f"{public} is already there: keys are never overwritten")
    write_secret(
        path,
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    write_atomic(public, f"{text}\n")
    return text


def public_line(key: ec.EllipticCurvePublicKey) -> str:
    """Return a public key as one line of OpenSSH's, without a comment: how a link names a client."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def line_of_pem(pem: bytes) -> str:
    """Return the line of a public key that Flower has verified."""
    key = serialization.load_pem_public_key(pem)
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("Flower's keys are of elliptic curves")
    return public_line(key)


def pem_of_line(line: str) -> bytes:
    """Return a public key as Flower takes it."""
    return read_public(line).public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def read_public(line: str) -> ec.EllipticCurvePublicKey:
    """Return the public key of a line such as ``ecdsa-sha2-nistp384 AAAA... comment``."""
    try:
        key = serialization.load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise UserError(f"{line[:40]!r} is no public key: give the line that bespoke keys prints")
    return key


def public_of(path: Path) -> str:
    """Return the public key of a private one's file."""
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"--key {path}: {error.strerror}; make one with: bespoke keys {path}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise UserError(f"--key {path} holds no private key without a password: make one with: bespoke keys NEW_FILE")
    return public_line(key.public_key())


def read_lines(paths: Iterable[Path]) -> list[str]:
    """Return the public keys in files, one a line, each once; blank lines and comments are skipped."""
    found: dict[str, None] = {}
    for path in paths:
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise UserError(f"--register {path}: {why}; give files of public keys, one a line") from None
        for line in text.splitlines():
            if line.strip() and not line.lstrip().startswith("#"):
                found[public_line(read_public(line.strip()))] = None
    return list(found)


def make_certificates(folder: Path, hosts: Iterable[str]) -> None:
    """Write an authority's certificate, and a server's with its key, for these hosts; the authority's key is dropped.

    So nobody can make a second certificate that the clients would believe; a new one means a new ``ca.crt`` for all.
    """
    if existing := [name for name in (CA, CERTIFICATE, KEY) if (folder / name).exists()]:
        raise UserError(f"{folder / existing[0]} is already there: certificates are never overwritten")
    make_folder(folder)
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bespoke federation")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bespoke server")])
    is_authority = x509.BasicConstraints(ca=True, path_length=0)
    root = _certificate(issuer, issuer, authority.public_key()).add_extension(is_authority, critical=True)
    names = x509.SubjectAlternativeName([_named(host) for host in dict.fromkeys(hosts)])
    leaf = _certificate(subject, issuer, server.public_key()).add_extension(names, critical=False)
    leaf = leaf.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    signer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    root = root.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
    leaf = leaf.add_extension(signer, critical=False)
    for name, builder in ((CA, root), (CERTIFICATE, leaf)):
        made = builder.sign(authority, hashes.SHA384())
        write_atomic(folder / name, made.public_bytes(serialization.Encoding.PEM))
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    write_secret(folder / KEY, server.private_bytes(*pem))


def _certificate(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return x509.CertificateBuilder(
        issuer,
        subject,
        key,
        x509.random_serial_number(),
        now - datetime.timedelta(days=1),  # the clients' clocks may be slow
        now + datetime.timedelta(days=365 * _YEARS),
    )


def _named(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        if not host.isascii() or not host.strip():
            raise UserError(
                f"{shown(host)} is no name of a server: write it in plain letters, xn--... for others"
            ) from None
        return x509.DNSName(host)


def new_secret(path: Path) -> bytes:
    """Write bytes that nobody can guess, in the place of earlier ones, and return them."""
    path.unlink(missing_ok=True)
    write_secret(path, secret := secrets.token_bytes(32))
    return secret


def write_secret(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read; never over another one."""
    make_folder(path.parent)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise UserError(f"{path} is already there: keys are never overwritten") from None
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}; choose another file") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
    except OSError as error:
        path.unlink(missing_ok=True)  # half a key is none
        raise write_error(path, error) from None
