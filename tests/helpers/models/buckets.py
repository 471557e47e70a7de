"""Buckets for a test: fsspec's in memory, and Amazon S3 on localhost (moto), which s3fs talks to as
it does to the real one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest


@contextmanager
def memory_bucket() -> Iterator[Any]:
    """fsspec's filesystem in memory, emptied at the end of the block."""
    files = fsspec.filesystem("memory")
    yield files
    files.store.clear()


@contextmanager
def s3_bucket(name: str, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket, for the block; skips the test where moto or s3fs are missing."""
    moto = pytest.importorskip("moto.server", reason="needs moto: pip install -e '.[dev]'")
    s3fs = pytest.importorskip("s3fs", reason="needs s3fs: pip install -e '.[dev]'")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    told = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for variable, value in told.items():
        patch.setenv(variable, value)
    s3fs.S3FileSystem.clear_instance_cache()
    try:
        s3fs.S3FileSystem().mkdir(name)
        yield f"s3://{name}"
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
