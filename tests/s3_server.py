"""An S3-compatible server on 127.0.0.1."""

from __future__ import annotations

import http.client
import itertools
import subprocess
import sys
from typing import Any, Self

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
