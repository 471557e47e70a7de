import av
import numpy as np
import pytest

from data.errors import DatasetError
from data.video import VideoReader, VideoWriter, count_packets

FPS, SIZE = 10, 32


def picture(number):
    frame = np.full((SIZE, SIZE, 3), 30, np.uint8)
    frame[4 * (number // 8 % 8) :][:4] = 120
    frame[:, 4 * (number % 8) :][:, :4] = 220
    return frame


@pytest.fixture
def clip(tmp_path):
    writer = VideoWriter(tmp_path / "clip.mp4", FPS, SIZE, SIZE)
    for first in range(0, 60, 15):
        writer.add(np.stack([picture(first + k) for k in range(15)]))
    writer.close()
    return tmp_path / "clip.mp4"


def encode(path, codec, options):
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=FPS, options=options)
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        for number in range(60):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        out.mux(stream.encode(None))


def assert_reads_right(path):
    expected = np.stack([picture(k) for k in range(60)]).astype(int)
    with VideoReader(path) as reader:
        for start, count in ((0, 60), (17, 5), (59, 1), (3, 20), (44, 16), (1, 1)):
            frames = reader.read(start / FPS, count, FPS)
            error = np.abs(frames.astype(int) - expected[start : start + count])
            assert error.mean(axis=(1, 2, 3)).max() < 15


def test_any_range_of_frames_decodes_to_those_frames(clip):
    assert_reads_right(clip)


@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"g": "12", "bf": "3"}),
        ("libx265", {"g": "2", "x265-params": "open-gop=1:bframes=3:keyint=6:log-level=none"}),
        ("libsvtav1", {"g": "2", "crf": "20", "svtav1-params": "lp=1"}),
    ],
)
def test_other_encoders_and_open_groups_decode_to_those_frames(tmp_path, codec, options):
    encode(tmp_path / "other.mp4", codec, options)
    assert_reads_right(tmp_path / "other.mp4")


def test_a_start_that_drifted_by_less_than_half_a_frame_reads_the_nearest(clip):
    with VideoReader(clip) as reader:
        exact = reader.read(2.0, 4, FPS)
        for drift in (0.04, -0.04):
            assert np.array_equal(reader.read(2.0 + drift, 4, FPS), exact)


def test_frames_past_the_end_are_an_error_that_names_them(clip):
    with VideoReader(clip) as reader, pytest.raises(DatasetError, match=r"clip\.mp4, frame 60"):
        reader.read(5.0, 20, FPS)


def test_a_truncated_file_has_fewer_packets_and_an_error_where_it_ends(clip):
    whole = clip.read_bytes()
    clip.write_bytes(whole[: len(whole) * 2 // 3])
    assert 0 < count_packets(clip) < 60
    with VideoReader(clip) as reader:
        assert reader.read(0.0, 5, FPS).shape == (5, SIZE, SIZE, 3)
        with pytest.raises(DatasetError, match="truncated or damaged"):
            reader.read(0.0, 60, FPS)


def test_a_file_without_its_index_is_no_video(clip):
    clip.write_bytes(clip.read_bytes()[:200])
    with pytest.raises(DatasetError, match=r"clip\.mp4, file: is no readable video"):
        VideoReader(clip)
