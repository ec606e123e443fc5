"""Certificate authorities, certificates and kubeconfigs of the cluster."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import IPv4Address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from local_cluster.config import ClusterConfig
from local_cluster.paths import write_if_changed

_VALID_FOR = timedelta(days=3650)
_CLOCK_LEEWAY = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CertificatePair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificates folder, by role."""

    folder: Path

    @property
    def authority(self) -> CertificatePair:
        return self.pair("authority")

    @property
    def etcd_authority(self) -> CertificatePair:
        """Return etcd's own authority, so that no kubelet certificate grants access to the database."""
        return self.pair("etcd-authority")

    def pair(self, name: str) -> CertificatePair:
        return CertificatePair(self.folder / f"{name}.crt", self.folder / f"{name}.key")

    def kubeconfig(self, name: str) -> Path:
        return self.folder / f"{name}.kubeconfig"


def make_certificates(folder: Path, shape: ClusterConfig) -> Certificates:
    """Create missing certificates; existing ones stay, so a second `up` restarts nothing."""
    certificates = Certificates(folder)
    for authority in (certificates.authority, certificates.etcd_authority):
        _ensure_authority(authority, shape.name)
    host = [shape.host_address, IPv4Address("127.0.0.1")]
    etcd = certificates.etcd_authority
    _ensure(certificates.pair("etcd"), etcd, "etcd", addresses=host)
    _ensure(certificates.pair("etcd-client"), etcd, "kube-apiserver")
    cluster = certificates.authority
    _ensure(
        certificates.pair("apiserver"),
        cluster,
        "kube-apiserver",
        names=["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"],
        addresses=[*host, shape.api_service_address],
    )
    _ensure(certificates.pair("kubelet-client"), cluster, "kube-apiserver-kubelet-client", group="system:masters")
    _ensure_key(certificates.pair("service-accounts").key)
    users = {
        "admin": ("local-cluster-admin", "system:masters"),
        "controller-manager": ("system:kube-controller-manager", None),
        "scheduler": ("system:kube-scheduler", None),
        "kube-proxy": ("system:kube-proxy", None),
        "coredns": ("system:coredns", None),
    }
    for node in shape.node_names:
        users[f"kubelet-{node}"] = (f"system:node:{node}", "system:nodes")
        serving = certificates.pair(f"kubelet-serving-{node}")
        _ensure(serving, cluster, node, names=[node], addresses=[shape.node_address(node), IPv4Address("127.0.0.1")])
    for name, (user, group) in users.items():
        _ensure(certificates.pair(name), cluster, user, group=group)
        write_if_changed(certificates.kubeconfig(name), _kubeconfig(certificates, name, shape), mode=0o600)
    return certificates


def _ensure_authority(pair: CertificatePair, name: str) -> None:
    if pair.certificate.exists():
        return
    key = _ensure_key(pair.key)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name}-{pair.certificate.stem}")])
    certificate = (
        _builder(subject, subject, key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(pair.certificate, certificate)


def _ensure(  # noqa: PLR0913 - the parts of a certificate
    pair: CertificatePair,
    authority: CertificatePair,
    user: str,
    *,
    group: str | None = None,
    names: list[str] | None = None,
    addresses: list[IPv4Address] | None = None,
) -> None:
    if pair.certificate.exists() and _certifies(pair, authority, addresses or []):
        return
    issuer = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    key = _ensure_key(pair.key)
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, user)]
    if group is not None:
        parts.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
    builder = (
        _builder(x509.Name(parts), issuer.subject, key)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH]), critical=False
        )
    )
    alternatives: list[x509.GeneralName] = [x509.DNSName(name) for name in names or []]
    alternatives += [x509.IPAddress(address) for address in addresses or []]
    if alternatives:
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
    _write(pair.certificate, builder.sign(_load_key(authority.key), hashes.SHA256()))


def _certifies(pair: CertificatePair, authority: CertificatePair, addresses: list[IPv4Address]) -> bool:
    """Return whether the certificate covers these addresses, which cluster.yaml may have changed."""
    certificate = x509.load_pem_x509_certificate(pair.certificate.read_bytes())
    issuer = x509.load_pem_x509_certificate(authority.certificate.read_bytes())
    if certificate.issuer != issuer.subject:
        return False
    if not addresses:
        return True
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return set(addresses) <= set(extension.value.get_values_for_type(x509.IPAddress))


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_LEEWAY)
        .not_valid_after(now + _VALID_FOR)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_encipherment=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _ensure_key(file: Path) -> ec.EllipticCurvePrivateKey:
    if not file.exists():
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        write_if_changed(file, pem.decode(), mode=0o600)
    return _load_key(file)


def _load_key(file: Path) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(file.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError(f"{file} holds another kind of key; remove it and run `up` again")
    return key


def _write(file: Path, certificate: x509.Certificate) -> None:
    write_if_changed(file, certificate.public_bytes(serialization.Encoding.PEM).decode())


def _kubeconfig(certificates: Certificates, name: str, shape: ClusterConfig) -> str:
    """Return a kubeconfig with embedded certificates, which can be copied anywhere on this machine."""

    def embedded(file: Path) -> str:
        return base64.b64encode(file.read_bytes()).decode()

    pair = certificates.pair(name)
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": shape.name,
        "clusters": [
            {
                "name": shape.name,
                "cluster": {
                    "server": f"https://{shape.host_address}:6443",
                    "certificate-authority-data": embedded(certificates.authority.certificate),
                },
            }
        ],
        "users": [
            {
                "name": name,
                "user": {
                    "client-certificate-data": embedded(pair.certificate),
                    "client-key-data": embedded(pair.key),
                },
            }
        ],
        "contexts": [{"name": shape.name, "context": {"cluster": shape.name, "user": name}}],
    }
    return json.dumps(document, indent=2) + "\n"
