"""A TLS server on loopback, whose key and certificates are for tests alone: P-256, made by hand,
trusted nowhere."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgfM+jCw/N/3GRnHPe
dZlZKIRSenGTmCQKAUDDXLgOV2ihRANCAAQcFXm9RpQpvzmVWRN5L6HTNlR9jAXA
lDm9wxd66UL3L8Q3mGxKUXKqo5wfPsO03DQT9ajo/3JWU2hzExNqYqv+
-----END PRIVATE KEY-----
"""
CERTIFICATES = {
    "self-signed": """\
-----BEGIN CERTIFICATE-----
MIIBczCCARmgAwIBAgIUA1Jxgh8nvic755xleNO21npvRHcwCgYIKoZIzj0EAwIw
IDEeMBwGA1UEAwwVbG9vcGJhY2sgb2YgdGhlIHRlc3RzMCAXDTAwMDEwMTAwMDAw
MFoYDzIxMDAwMTAxMDAwMDAwWjAgMR4wHAYDVQQDDBVsb29wYmFjayBvZiB0aGUg
dGVzdHMwWTATBgcqhkjOPQIBBggqhkjOPQMBBwNCAAQcFXm9RpQpvzmVWRN5L6HT
NlR9jAXAlDm9wxd66UL3L8Q3mGxKUXKqo5wfPsO03DQT9ajo/3JWU2hzExNqYqv+
oy8wLTAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwDwYDVR0TAQH/BAUwAwEB
/zAKBggqhkjOPQQDAgNIADBFAiEA1hGDg1xzeOF4edKOSMFvorvxFMhrq8lO3Ti7
ByQu4t8CIErRj37CwJEOlhHdoSp2KqsyZorP6d739rXTEcE24YjP
-----END CERTIFICATE-----
""",
    "expired": """\
-----BEGIN CERTIFICATE-----
MIIBcDCCARegAwIBAgIUcoxOOijCFauaj+rMGpyYeHT/tgcwCgYIKoZIzj0EAwIw
IDEeMBwGA1UEAwwVbG9vcGJhY2sgb2YgdGhlIHRlc3RzMB4XDTAwMDEwMTAwMDAw
MFoXDTAxMDEwMTAwMDAwMFowIDEeMBwGA1UEAwwVbG9vcGJhY2sgb2YgdGhlIHRl
c3RzMFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEHBV5vUaUKb85lVkTeS+h0zZU
fYwFwJQ5vcMXeulC9y/EN5hsSlFyqqOcHz7DtNw0E/Wo6P9yVlNocxMTamKr/qMv
MC0wGgYDVR0RBBMwEYIJbG9jYWxob3N0hwR/AAABMA8GA1UdEwEB/wQFMAMBAf8w
CgYIKoZIzj0EAwIDRwAwRAIgEY/RNTQkTI8J7m2KMyBkMSHz6uXxGpSnTeP9hMr2
MOoCIHygDGQ6I5tBx3F5VmZIHG1vun9LSAc1WA1b6KwgIn4S
-----END CERTIFICATE-----
""",
    "another name": """\
-----BEGIN CERTIFICATE-----
MIIBXzCCAQagAwIBAgIUYUcQ7KyJPxG8wssuVs6tZhO2hMQwCgYIKoZIzj0EAwIw
FzEVMBMGA1UEAwwMYW5vdGhlciBuYW1lMCAXDTAwMDEwMTAwMDAwMFoYDzIxMDAw
MTAxMDAwMDAwWjAXMRUwEwYDVQQDDAxhbm90aGVyIG5hbWUwWTATBgcqhkjOPQIB
BggqhkjOPQMBBwNCAAQcFXm9RpQpvzmVWRN5L6HTNlR9jAXAlDm9wxd66UL3L8Q3
mGxKUXKqo5wfPsO03DQT9ajo/3JWU2hzExNqYqv+oy4wLDAZBgNVHREEEjAQgg5l
bHNld2hlcmUudGVzdDAPBgNVHRMBAf8EBTADAQH/MAoGCCqGSM49BAMCA0cAMEQC
IAjut+rtEb7imJJkf5Egy7WC7P3wVsxHKxz6tqpWdYCpAiA5FyjeuBXh0NwPsLAl
jGllQ+nR2ACQcRhsM0ivBfgiDg==
-----END CERTIFICATE-----
""",
}
"""What is wrong with it -> a certificate; the authority of each is itself."""


class _Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b'{"data": [{"id": "m"}]}'
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        pass  # a client that refuses the certificate


@contextlib.contextmanager
def https_server(folder: Path, fault: str) -> Iterator[tuple[int, Path]]:
    """(the port of a server with a certificate of ``CERTIFICATES``, the file of that certificate);
    ``fault`` "no TLS": a server without."""
    server = _Server(("127.0.0.1", 0), _Answers)
    file = folder / "certificate.pem"
    if fault != "no TLS":
        (folder / "key.pem").write_text(KEY)
        file.write_text(CERTIFICATES[fault])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(file, folder / "key.pem")
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], file
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
