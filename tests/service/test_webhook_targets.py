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

from cairn.service.errors import SettingsError, TargetRefusedError
from cairn.service.events import posting, targets
from cairn.service.events.posting import PostFailedError, post
from cairn.service.events.targets import check_addresses, parse_target, resolve
from cairn.service.settings import Settings
from tests.service.receivers import receiving

LOOPBACK = Settings(webhook_networks="127.0.0.0/8, ::1/128").networks
REAL = socket.getaddrinfo


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://ci.example.com/", "http://, which only CAIRN_WEBHOOK_NETWORKS can allow"),
        ("ftp://ci.example.com/", "another address"),
        ("ci.example.com", "another address"),
        ("https://", "another address"),
        ("https://ci.example.com/#part", "another address"),
        ("https://user:hush@ci.example.com/", "one with them"),
        ("https://@ci.example.com/", "one with them"),
        ("https://ci.example.com:99999/", "another: Port out of range"),
        ("https://[::1/", "another: "),
        ("https://a..b/", "another: "),
        ("https://ci.example.com/a b", "others"),
        ("https://ci.example.com/\r\nHost: b", "others"),
        ("https://exämple.com/", "others"),
        ("https://127.0.0.1/", "127.0.0.1"),
        ("https://127.1/", "127.0.0.1"),
        ("https://2130706433/", "127.0.0.1"),
        ("https://0x7f000001/", "127.0.0.1"),
        ("https://0177.0.0.1/", "127.0.0.1"),
        ("https://0/", "0.0.0.0"),
        ("https://10.1.2.3/", "10.1.2.3"),
        ("https://172.16.0.1/", "172.16.0.1"),
        ("https://192.168.0.1/", "192.168.0.1"),
        ("https://100.64.0.1/", "100.64.0.1"),
        ("https://169.254.169.254/latest/meta-data/", "169.254.169.254"),
        ("https://168.63.129.16/", "168.63.129.16"),
        ("https://100.100.100.200/", "100.100.100.200"),
        ("https://224.0.0.1/", "224.0.0.1"),
        ("https://255.255.255.255/", "255.255.255.255"),
        ("https://[::1]/", "::1"),
        ("https://[::]/", "::"),
        ("https://[fe80::1]/", "fe80::1"),
        ("https://[fd00:ec2::254]/", "fd00:ec2::254"),
        ("https://[ff02::1]/", "ff02::1"),
        ("https://[::ffff:127.0.0.1]/", "::ffff:"),
        ("https://[::ffff:169.254.169.254]/", "::ffff:"),
        ("https://[::127.0.0.1]/", "::"),
        ("https://[64:ff9b::a9fe:a9fe]/", "64:ff9b::a9fe:a9fe"),
        ("https://[2002:7f00:1::]/", "2002:7f00:1::"),
    ],
)
def test_address_that_leads_where_nothing_may_be_sent_is_refused(url, found):
    with pytest.raises(TargetRefusedError) as refused:
        parse_target(url, ())
    assert f"found {found}" in str(refused.value)
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
    target = parse_target(url, ())
    assert (target.authority, target.path) == (authority, path)


def test_networks_that_a_setting_names_may_be_sent_to_without_tls_and_no_others():
    for url in ("http://127.0.0.1:1/", "https://127.0.0.1/", "http://[::1]:1/"):
        parse_target(url, LOOPBACK)
    for url in ("http://10.0.0.1/", "https://10.0.0.1/", "http://93.184.215.14/"):
        with pytest.raises(TargetRefusedError):
            parse_target(url, LOOPBACK)
    mapped = ipaddress.ip_address("::ffff:127.0.0.1")
    check_addresses([mapped], "http", LOOPBACK)


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
    with pytest.raises(TargetRefusedError, match=r"found 10\.0\.0\.1\. CAIRN_WEBHOOK_NETWORKS"):
        resolve(parse_target("https://ci.example.com/", ()), ())


def test_connection_goes_to_the_address_that_was_looked_at(monkeypatch):
    with receiving() as receiver:
        port = receiver.url.rpartition(":")[2]
        asked = resolving(monkeypatch, ["127.0.0.1"], ["10.0.0.1"])
        target = parse_target(f"http://ci.example.com:{port}/", LOOPBACK)
        assert post(target, HEADERS, BODY, LOOPBACK) == 200
        assert asked == [["127.0.0.1"]]
        with pytest.raises(TargetRefusedError):
            post(target, HEADERS, BODY, LOOPBACK)
        assert len(receiver.messages) == 1


HEADERS = {"webhook-id": "a", "webhook-timestamp": "1", "webhook-signature": "v1,b"}
BODY = b'{"data": {}}'


def test_name_that_means_nothing_is_a_failure_that_says_so(monkeypatch):
    def unknown(*_args, **_options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(targets.socket, "getaddrinfo", unknown)
    with pytest.raises(PostFailedError, match=r"from ci\.example\.com, found none: gaierror: "):
        post(parse_target("https://ci.example.com/", ()), HEADERS, BODY, ())


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
        named = parse_target(f"https://localhost:{port}/", loopback)
        numbered = parse_target(f"https://127.0.0.1:{port}/", loopback)
        with pytest.raises(PostFailedError, match="CERTIFICATE_VERIFY_FAILED"):
            post(named, HEADERS, BODY, loopback)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        posting._context.cache_clear()
        try:
            assert post(named, HEADERS, BODY, loopback) == 204
            with pytest.raises(PostFailedError, match="CERTIFICATE_VERIFY_FAILED"):
                post(numbered, HEADERS, BODY, loopback)
        finally:
            posting._context.cache_clear()
