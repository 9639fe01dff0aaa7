"""Where events may be sent: to no network that only the server reaches, whatever a name means."""

import ipaddress
import socket
import ssl
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from cairn import Settings, SettingsError
from cairn.service.errors import TargetRefusedError
from tests.service.receivers import receiving
from tests.service.seams import http_post, targets

LOOPBACK = Settings(webhook_networks="127.0.0.0/8, ::1/128").networks
REAL = socket.getaddrinfo


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://ci.example.com/", "only CAIRN_WEBHOOK_NETWORKS can allow http://"),
        ("ftp://ci.example.com/", "use https:// and a host, without a fragment"),
        ("ci.example.com", "use https:// and a host, without a fragment"),
        ("https://", "use https:// and a host, without a fragment"),
        ("https://ci.example.com/#part", "use https:// and a host, without a fragment"),
        ("https://user:hush@ci.example.com/", "leave user and password out"),
        ("https://@ci.example.com/", "leave user and password out"),
        ("https://ci.example.com:99999/", "example.com/cairn (Port out of range"),
        ("https://[::1/", "such as https://ci.example.com/cairn ("),
        ("https://a..b/", "such as https://ci.example.com/cairn ("),
        ("https://ci.example.com/a b", "ASCII at most, without spaces"),
        ("https://ci.example.com/\r\nHost: b", "ASCII at most, without spaces"),
        ("https://exämple.com/", "ASCII at most, without spaces"),
        ("https://127.0.0.1/", "127.0.0.1"),
        ("https://127.1/", "127.0.0.1"),
        ("https://2130706433/", "127.0.0.1"),
        ("https://0x7f000001/", "127.0.0.1"),
        ("https://0177.0.0.1/", "127.0.0.1"),
        ("https://0/", "0.0.0.0"),
        ("https://169.254.169.254/latest/meta-data/", "169.254.169.254"),
        ("https://[::1]/", "::1"),
        ("https://[fe80::1%25eth0]/", "fe80::1"),
        ("https://[::ffff:127.0.0.1]/", "::ffff:"),
    ],
)
def test_address_that_leads_where_nothing_may_be_sent_is_refused(url, reason):
    with pytest.raises(TargetRefusedError) as refused:
        targets.parse_target(url, ())
    assert reason in str(refused.value)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://ci.example.com", "ci.example.com", "/"),
        ("https://ci.example.com:443/a?b=c", "ci.example.com", "/a?b=c"),
        ("https://93.184.215.14:8443/", "93.184.215.14:8443", "/"),
        ("https://[2606:2800:220:1::1]/x", "[2606:2800:220:1::1]", "/x"),
    ],
)
def test_public_address_is_taken(url, authority, path):
    target = targets.parse_target(url, ())
    assert (target.authority, target.path) == (authority, path)


def is_refused(address):
    try:
        targets.check_addresses([address], "https", ())
    except TargetRefusedError:
        return True
    return False


# IANA's registries of special-purpose addresses, and what is reserved besides. True: the addresses
# on both sides of a block are public.
SPECIAL = {
    "0.0.0.0/8": False,
    "10.0.0.0/8": True,
    "100.64.0.0/10": True,
    "127.0.0.0/8": True,
    "168.63.129.16/32": True,
    "169.254.0.0/16": True,
    "172.16.0.0/12": True,
    "192.0.0.0/24": False,
    "192.0.2.0/24": True,
    "192.88.99.0/24": True,
    "192.168.0.0/16": True,
    "198.18.0.0/15": True,
    "198.51.100.0/24": True,
    "203.0.113.0/24": True,
    "224.0.0.0/4": False,
    "240.0.0.0/4": False,
    "::/128": False,
    "::1/128": False,
    "::/96": False,
    "::ffff:0:0:0/96": False,
    "64:ff9b:1::/48": False,
    "100::/64": False,
    "100:0:0:1::/64": False,
    "2001::/23": False,
    "2001::/32": False,
    "2001:2::/48": False,
    "2001:10::/28": False,
    "2001:20::/28": False,
    "2001:db8::/32": True,
    "2002::/16": True,
    "3ffe::/16": False,
    "3fff::/20": False,
    "4000::/2": False,
    "5f00::/16": False,
    "fc00::/7": False,
    "fe80::/10": False,
    "fec0::/10": False,
    "ff00::/8": False,
}


@pytest.mark.parametrize("block", SPECIAL)
def test_block_that_is_not_public_is_refused_from_end_to_end_and_nothing_beside_it(block):
    network = ipaddress.ip_network(block)
    middle = network[network.num_addresses // 2]
    assert all(map(is_refused, (network[0], middle, network[-1])))
    if SPECIAL[block]:
        beside = network[0] - 1, network[-1] + 1
        assert not any(map(is_refused, beside)), beside


EMBEDDING = {
    "mapped": lambda ipv4: 0xFFFF << 32 | ipv4,
    "compatible": lambda ipv4: ipv4,
    "translated": lambda ipv4: 0xFFFF << 48 | ipv4,
    "NAT64": lambda ipv4: 0x64FF9B << 96 | ipv4,
    "NAT64 of a network": lambda ipv4: 0x64FF9B0001 << 80 | ipv4,
    "6to4": lambda ipv4: 0x2002 << 112 | ipv4 << 80 | 1,
    "Teredo": lambda ipv4: 0x20010000 << 96 | ipv4 ^ 0xFFFFFFFF,
    "Teredo's server": lambda ipv4: 0x20010000 << 96 | ipv4 << 64 | 0xA24728F1,
    "ISATAP": lambda ipv4: 0x2606280002200001 << 64 | 0x5EFE << 32 | ipv4,
    "ISATAP, universal": lambda ipv4: 0x2606280002200001 << 64 | 0x02005EFE << 32 | ipv4,
}
"""Forms of IPv6 addresses that have one of IPv4 in them."""


@pytest.mark.parametrize("form", EMBEDDING)
def test_ipv6_address_leads_to_no_ipv4_address_that_is_refused(form):
    embedded = {
        ipv4: ipaddress.IPv6Address(EMBEDDING[form](int(ipaddress.IPv4Address(ipv4))))
        for ipv4 in ("127.0.0.1", "10.0.0.1", "169.254.169.254", "192.0.0.192", "93.184.215.14")
    }
    public = embedded.pop("93.184.215.14")
    assert is_refused(public) is (form not in ("mapped", "NAT64"))
    assert all(map(is_refused, embedded.values())), embedded


def test_networks_that_a_setting_names_may_be_sent_to_without_tls_and_no_others():
    for url in ("http://127.0.0.1:1/", "https://127.0.0.1/", "http://[::1]:1/"):
        targets.parse_target(url, LOOPBACK)
    for url in ("http://10.0.0.1/", "https://10.0.0.1/", "http://93.184.215.14/"):
        with pytest.raises(TargetRefusedError):
            targets.parse_target(url, LOOPBACK)
    mapped = ipaddress.ip_address("::ffff:127.0.0.1")
    targets.check_addresses([mapped], "http", LOOPBACK)


def test_setting_that_names_no_network_is_refused():
    with pytest.raises(SettingsError, match=r"CAIRN_WEBHOOK_NETWORKS: .*10\.0\.0\.1/8.*host bits"):
        Settings(webhook_networks="10.0.0.1/8")


def resolving(monkeypatch, *answers):
    """Of a name, one answer after the other; how often it was asked for."""
    asked = []

    def resolved(host, port, *more, **options):
        if host != "ci.example.com":
            return REAL(host, port, *more, **options)
        found = answers[min(len(asked), len(answers) - 1)]
        asked.append(found)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in found]

    monkeypatch.setattr(targets.socket, "getaddrinfo", resolved)
    return asked


@pytest.mark.parametrize("others", [["10.0.0.1"], ["93.184.215.14", "10.0.0.1"]])
def test_name_that_means_a_private_address_among_others_is_refused(monkeypatch, others):
    resolving(monkeypatch, others)
    with pytest.raises(TargetRefusedError, match=r"10\.0\.0\.1 is no public address"):
        targets.resolve(targets.parse_target("https://ci.example.com/", ()), ())


def test_connection_goes_to_the_address_that_was_looked_at(monkeypatch):
    with receiving() as receiver:
        port = receiver.url.rpartition(":")[2]
        asked = resolving(monkeypatch, ["127.0.0.1"], ["10.0.0.1"])
        target = targets.parse_target(f"http://ci.example.com:{port}/", LOOPBACK)
        assert http_post.post(target, HEADERS, BODY, LOOPBACK) == 200
        assert asked == [["127.0.0.1"]]
        with pytest.raises(TargetRefusedError):
            http_post.post(target, HEADERS, BODY, LOOPBACK)
        assert len(receiver.messages) == 1


HEADERS = {"webhook-id": "a", "webhook-timestamp": "1", "webhook-signature": "v1,b"}
BODY = b'{"data": {}}'


def test_name_that_means_nothing_is_a_failure_that_says_so(monkeypatch):
    def unknown(*_args, **_options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(targets.socket, "getaddrinfo", unknown)
    with pytest.raises(
        http_post.PostFailedError, match=r"from ci\.example\.com, found none: gaierror: "
    ):
        http_post.post(targets.parse_target("https://ci.example.com/", ()), HEADERS, BODY, ())


@contextmanager
def tls_receiver(folder):
    """One that has a certificate of its own making for `localhost`; its port, and that file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = folder / "certificate.pem"
    pem.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = folder / "key.pem"
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem, private)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                try:
                    with context.wrap_socket(connection, server_side=True) as secure:
                        secure.recv(65536)
                        secure.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
                except OSError:
                    connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield server.getsockname()[1], pem
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def test_receiver_is_who_its_certificate_says_or_nothing_is_sent(tmp_path, monkeypatch):
    loopback = Settings(webhook_networks="127.0.0.0/8, ::1/128").networks
    with tls_receiver(tmp_path) as (port, certificate):
        named = targets.parse_target(f"https://localhost:{port}/", loopback)
        numbered = targets.parse_target(f"https://127.0.0.1:{port}/", loopback)
        with pytest.raises(http_post.PostFailedError, match="CERTIFICATE_VERIFY_FAILED"):
            http_post.post(named, HEADERS, BODY, loopback)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        http_post._context.cache_clear()
        try:
            assert http_post.post(named, HEADERS, BODY, loopback) == 204
            with pytest.raises(http_post.PostFailedError, match="CERTIFICATE_VERIFY_FAILED"):
                http_post.post(numbered, HEADERS, BODY, loopback)
        finally:
            http_post._context.cache_clear()
