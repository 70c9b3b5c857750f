"""TLS certificates made on the spot."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def write_self_signed(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """Write a certificate for 127.0.0.1 that signs itself, and its key; return both files."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / f"{name}.crt", folder / f"{name}.key"
    certificate_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return certificate_file, key_file


def write_without_extensions(
    folder: Path, *, name: str = "127.0.0.1", valid_hours: float = 24.0
) -> tuple[Path, Path, Path]:
    """Write an authority as that of an EKS cluster, and a certificate that it signed for an address, and its key.

    Neither certificate has a key usage or key identifiers. Return the three files.
    """
    authority_key = ec.generate_private_key(ec.SECP256R1())
    key = ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kubernetes")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "kube-apiserver")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(name))])

    def sign(subject: x509.Name, public_key: ec.EllipticCurvePublicKey, extension: x509.ExtensionType) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
        builder = builder.serial_number(x509.random_serial_number()).not_valid_before(now - dt.timedelta(days=9))
        builder = builder.not_valid_after(now + dt.timedelta(hours=valid_hours)).add_extension(extension, critical=True)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    files = (folder / "authority.crt", folder / "api.crt", folder / "api.key")
    files[0].write_bytes(sign(issuer, authority_key.public_key(), x509.BasicConstraints(ca=True, path_length=None)))
    files[1].write_bytes(sign(subject, key.public_key(), address))
    files[2].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


def verify_strictly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this Python make contexts for clients as 3.13 does: by the letter of RFC 5280."""
    create = ssl.create_default_context

    def create_strict(*arguments: Any, **options: Any) -> ssl.SSLContext:
        context = create(*arguments, **options)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", create_strict)


def server_context(certificate_file: Path, key_file: Path) -> ssl.SSLContext:
    """Return what a server needs to show this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate_file, key_file)
    return context
