"""An S3-compatible server on 127.0.0.1, and a proxy in front of it that spoils requests."""

from __future__ import annotations

import http.client
import itertools
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

import tensorstore as ts

# It ends with the pipe that only its parent holds open.
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "nobody",
    "AWS_SECRET_ACCESS_KEY": "nothing",
    "AWS_EC2_METADATA_DISABLED": "true",
}

_numbers = itertools.count()


class Server:
    """moto's server, in a process of its own."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().split()[-1])
        return self

    def __exit__(self, *_: object) -> None:
        with self._process:
            self._process.kill()

    def bucket(self) -> str:
        """Make an empty bucket and return its name."""
        name = f"bucket-{next(_numbers)}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("PUT", f"/{name}")
        assert connection.getresponse().status == 200
        connection.close()
        return name


def spec_of(port: int, bucket: str) -> dict[str, Any]:
    """Return the spec of a prefix in a bucket; failed requests are repeated soon."""
    return {
        "driver": "s3",
        "bucket": bucket,
        "path": "run",
        "endpoint": f"http://127.0.0.1:{port}",
        "aws_region": "us-east-1",
        "aws_credentials": {"type": "environment"},
        "s3_request_retries": {"max_retries": 20, "initial_delay": "5ms", "max_delay": "50ms"},
    }


def open_kv(spec: dict[str, Any]) -> Any:
    return ts.KvStore.open(spec | {"path": spec["path"] + "/"}).result()


class Request(NamedTuple):
    """A request as the proxy sees it; ``number`` counts all of them."""

    method: str
    path: str
    number: int

    @property
    def is_chunk(self) -> bool:
        return "/c." in self.path

    @property
    def is_manifest(self) -> bool:
        return self.path.endswith("manifest.json")


# What becomes of a request: None, or one of the names in ``_Handler``.
Fault = Callable[[Request], str | None]


class Proxy:
    """Passes requests on to a server, except where ``fault`` says what else becomes of them.

    Attributes:
      requests: all that came.
      sent: how many bytes of bodies went to clients.
      release: to be set for requests that are held to go on.
      landed: is set when one of these has reached the server.
    """

    def __init__(self, port: int, fault: Fault = lambda request: None) -> None:
        self.backend = port
        self.fault = fault
        self.requests: list[Request] = []
        self.sent = 0
        self.release, self.landed = threading.Event(), threading.Event()
        self.guard = threading.Lock()

    def __enter__(self) -> Self:
        proxy = self

        class Handler(_Handler):
            to = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def counts(self, method: str) -> Counter[str]:
        """Return how often each path was asked for."""
        return Counter(each.path for each in self.requests if each.method == method)


class _Server(ThreadingHTTPServer):
    daemon_threads = True  # a client may keep its connection open
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    to: Proxy

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:  # the client has gone
            self.close_connection = True

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        with self.to.guard:
            request = Request(self.command, self.path.partition("?")[0], len(self.to.requests))
            self.to.requests.append(request)
        fault = self.to.fault(request)
        if fault in ("500", "503", "403"):
            self._answer(int(fault), [], b"<Error><Code>Injected</Code></Error>")
        elif fault == "drop":
            self._hang_up()
        elif fault == "never":
            self.to.release.wait()
            self._hang_up()
        else:
            if fault == "late":
                self.to.release.wait()
            status, headers, answer = self._passed_on(body)
            self.to.landed.set()
            if fault == "lose the answer":
                self._hang_up()
            else:
                self._answer(status, headers, answer, is_cut=fault == "cut")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _serve  # noqa: N815

    def _passed_on(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.to.backend, timeout=60)
        try:
            connection.request(self.command, self.path, body, dict(self.headers.items()))
            response = connection.getresponse()
            return response.status, response.getheaders(), response.read()
        finally:
            connection.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], body: bytes, is_cut: bool = False
    ) -> None:
        self.send_response_only(status)
        length = str(len(body))
        for name, value in headers:
            if name.lower() == "content-length":
                length = value  # an answer to HEAD says it and has no body
            elif name.lower() not in ("connection", "transfer-encoding"):
                self.send_header(name, value)
        if self.command == "HEAD" or status != 204:
            self.send_header("Content-Length", length)
        self.end_headers()
        if is_cut:
            body = body[: len(body) // 2]
        if self.command != "HEAD":
            self.wfile.write(body)
            with self.to.guard:
                self.to.sent += len(body)
        if is_cut:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass
