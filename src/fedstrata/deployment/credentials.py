"""Certificates for TLS and keys for node authentication, as Flower wants them."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID


@dataclass(frozen=True)
class Certificates:
    """What a TLS server needs, and those who call it, as PEM."""

    authority: bytes
    server: bytes
    server_key: bytes
    expires: datetime


def certificates(names: Sequence[str], days: int) -> Certificates:
    """A server's certificate for these host names and IP addresses, and its authority's.

    The authority's key is gone when this returns: nobody can ever sign another certificate that the nodes believe.
    """
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    authority, server = _name("fedstrata federation"), _name(names[0][:64])
    begins = datetime.now(UTC) - timedelta(hours=1)  # the nodes' clocks may be behind
    expires = begins + timedelta(days=days)
    issuer_id = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())

    def sign(
        subject: x509.Name, key: ec.EllipticCurvePrivateKey, *extensions: tuple[x509.ExtensionType, bool]
    ) -> bytes:
        builder = (
            x509.CertificateBuilder(authority, subject, key.public_key(), x509.random_serial_number(), begins, expires)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_id), critical=False)
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority_key, hashes.SHA384()).public_bytes(Encoding.PEM)

    return Certificates(
        authority=sign(
            authority,
            authority_key,
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(key_cert_sign=True), True),
        ),
        server=sign(
            server,
            server_key,
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(digital_signature=True), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.SubjectAlternativeName([_alternative(name) for name in names]), False),
        ),
        server_key=server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        expires=expires,
    )


def node_key() -> tuple[bytes, bytes]:
    """A node's private and public key, as OpenSSH writes them."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"


def is_ip_address(name: str) -> bool:
    """Whether a name is an IP address, not a host name."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _alternative(name: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(name)) if is_ip_address(name) else x509.DNSName(name)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(*, key_cert_sign: bool = False, digital_signature: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=key_cert_sign,
        encipher_only=False,
        decipher_only=False,
    )
