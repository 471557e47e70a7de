"""Messages of the policy server: what comes through, and what is refused before it costs memory."""

import msgpack
import numpy as np
import pytest
import simplejpeg

from tools.serving.wire import pack, unpack


def array(**changed):
    content = {b"__ndarray__": True, b"data": bytes(8), b"dtype": "<f4", b"shape": [2]}
    return msgpack.packb({"x": {**content, **{k.encode(): v for k, v in changed.items()}}})


@pytest.mark.parametrize("dtype", ["?", "u1", "<i8", ">i2", "<f2", "<f4", ">f8"])
def test_an_array_comes_back_as_it_was(dtype):
    x = np.arange(6).reshape(2, 3).astype(dtype)
    back = unpack(pack({"image": {"front": x}}))["image"]["front"]
    assert back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


MSGPACK_NUMPY = {b"nd": True, b"type": "<f4", b"kind": b"", b"shape": [2], b"data": bytes(8)}
TEXT_KEYS = {"__ndarray__": True, "data": bytes(8), "dtype": "<f4", "shape": [2]}


def jpeg(data):
    return {b"__jpeg__": True, b"data": data}


GREY = simplejpeg.encode_jpeg(np.full((16, 24, 1), 90, np.uint8), colorspace="GRAY")
LARGE = simplejpeg.encode_jpeg(np.zeros((4096, 4096, 1), np.uint8), colorspace="GRAY")
LONG = simplejpeg.encode_jpeg(np.zeros((1, 8193, 1), np.uint8), colorspace="GRAY")


def test_a_jpeg_comes_as_its_pixels_grey_or_coloured():
    colours = np.zeros((16, 24, 3), np.uint8)
    colours[:] = (200, 30, 90)
    coloured = simplejpeg.encode_jpeg(colours, 95, "RGB", "420")
    back = unpack(msgpack.packb({"a": jpeg(GREY), "b": {"c": jpeg(coloured)}}))
    for found, wanted in ((back["a"], 90), (back["b"]["c"], colours)):
        assert found.shape == (16, 24, 3)
        assert np.abs(found.astype(int) - wanted).max() <= 3


def test_few_bytes_of_jpeg_never_become_many_pixels():
    assert len(LARGE) < 2**19
    assert unpack(msgpack.packb({"a": jpeg(LARGE)}))["a"].shape == (4096, 4096, 3)
    with pytest.raises(ValueError, match="over 8192 pixels a side or 67108864 bytes"):
        unpack(msgpack.packb({"a": jpeg(LARGE), "b": jpeg(LARGE)}))


def test_numbers_text_and_numpy_scalars_come_back():
    message = {"a": np.float32(0.5), "b": np.bool_(True), "c": 7, "d": "grün", "e": [1, 2.5]}
    assert unpack(pack(message)) == {"a": 0.5, "b": True, "c": 7, "d": "grün", "e": [1, 2.5]}


@pytest.mark.parametrize("value", [np.array([{}]), np.array([1j]), np.array(["a"]), object()])
def test_what_is_no_number_is_not_packed(value):
    with pytest.raises(ValueError, match="cannot hold"):
        pack({"x": value})


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "incomplete"),
        (b"\xc1", "not msgpack"),
        (pack({"a": 1})[:-1], "incomplete"),
        (pack({"a": 1}) * 2, "after its end"),
        (msgpack.packb([1]), "a list; send a map"),
        (msgpack.packb({1: 2}), "not allowed for map key"),
        (msgpack.packb({b"a": 2}), "keys are printable text"),
        (pack({"image." * 100: 1}), "at most 256 characters"),
        (b"\x81\xa1\xff\x01", "decode"),
        (b"\x91" * 5000, "too deeply"),
        (b"\x81\xa1a" * 6 + b"\x01", "more than 4 deep"),
        (b"\xdd\xff\xff\xff\xff", "exceeds max_array_len"),
        (b"\xdf\xff\xff\xff\xff", "exceeds max_map_len"),
        (b"\xdc\x01\x00" + b"\x80" * 256, "more than 256 maps and lists"),
        (msgpack.packb({"t": msgpack.ExtType(5, b"x")}), "exceeds max_ext_len"),
        (pack({"\x1b[2J": 1}), r"key '\\x1b\[2J'; keys are printable text"),
        (msgpack.packb({"x": MSGPACK_NUMPY}), "msgpack-numpy's, .* pack them with chiliad_client"),
        (msgpack.packb({"x": TEXT_KEYS}), "their keys are text; pack them with chiliad_client"),
        (array(dtype="O"), "dtype 'O'"),
        (array(dtype="<U2"), "dtype '<U2'"),
        (array(dtype="<f4,<f4"), "dtype"),
        (array(dtype=[["a", "<f4"]]), "dtype"),
        (array(dtype=None), "dtype"),
        (array(data="text"), "not binary"),
        (array(shape=[10**9, 10**9]), "does not have the 8 bytes"),
        (array(shape=[0, 2**62]), "positive whole"),
        (array(shape=[-1]), "positive whole"),
        (array(shape=[True, 2]), "positive whole"),
        (array(shape=2), "positive whole"),
        (array(shape=[1] * 4 + [2]), "5 dims"),
        (msgpack.packb({"x": {b"__ndarray__": True}}), "dtype None"),
        (msgpack.packb({"x": {b"__jpeg__": True}}), "JPEG's data is not binary"),
        (msgpack.packb({"x": jpeg(b"")}), "a JPEG image was refused"),
        (msgpack.packb({"x": jpeg(GREY[:40])}), "a JPEG image was refused"),
        (msgpack.packb({"x": jpeg(LARGE[:-2000])}), "a JPEG image was refused"),
        (msgpack.packb({"x": jpeg(LONG)}), "over 8192 pixels a side"),
        (msgpack.packb({"x": {b"__npgeneric__": True, b"dtype": "<f4", b"data": "1"}}), "number"),
    ],
)
def test_a_malformed_message_is_refused(data, why):
    with pytest.raises(ValueError, match=why):
        unpack(data)
