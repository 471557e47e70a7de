"""openpi's own client, unmodified, in its own environment, against our server."""

import numpy as np
import pytest

from tests.helpers.tools.served import serving
from tests.helpers.tools.visitor import NEEDS_CLIENT, visit
from tools.serving import robots
from tools.serving.limits import Limits


@NEEDS_CLIENT
def test_openpis_client_reads_metadata_and_gets_chunks_and_errors():
    with serving(token="green", limits=Limits(message_bytes=2**20)) as running:
        told = visit(running.url, 3, "green")
    assert set(told["metadata"]["inputs"]) == {
        *("observation/front", "observation/wrist", "observation/state", "prompt")
    }
    chunk = np.full((2, 2), 0.5).tolist()
    assert told["good"] == told["nested"] == chunk
    assert told["steps of a broker"] == [chunk[0], chunk[1], chunk[0]]
    assert "RuntimeError: Error in inference server" in told["wrong dtype"]
    assert "int64 [48, 48, 3]; expected uint8" in told["wrong dtype"]
    assert "lacks ['wrist']" in told["missing camera"]
    assert "1009" in told["oversized"]
    assert "exceeds limit of 1048576 bytes" in told["oversized"]


def test_robots_that_reach_no_server_say_so():
    with pytest.raises(ValueError, match=r"ws://127.0.0.1:1 does not answer: .*server running"):
        robots.main("ws://127.0.0.1:1", robots=2)


@NEEDS_CLIENT
def test_openpis_client_with_a_wrong_key_is_refused():
    with serving(token="green") as running, pytest.raises(AssertionError, match="HTTP 401"):
        visit(running.url, 3, "red")
