import os
import subprocess
import sys
from fractions import Fraction

import av
import numpy as np
import pytest

from data.errors import DatasetError
from data.video.encoding import VideoEncoding, write_video
from data.video.seek import seek_table
from data.video.span import Packets
from data.video.video import VideoReader

FPS, SIZE = 10, 32


def picture(number):
    frame = np.full((SIZE, SIZE, 3), 30, np.uint8)
    frame[4 * (number // 8 % 8) :][:4] = 120
    frame[:, 4 * (number % 8) :][:, :4] = 220
    return frame


EVERY = np.stack([picture(k)[..., 0] for k in range(64)]).astype(np.int16)


@pytest.fixture
def clip(tmp_path):
    write_video(
        tmp_path / "clip.mp4", np.stack([picture(k) for k in range(60)]), FPS, VideoEncoding()
    )
    return tmp_path / "clip.mp4"


def encode(path, codec, options, rate=FPS, frames=60):
    with av.open(str(path), "w") as out:
        stream = out.add_stream(codec, rate=rate, options=options)
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            out.mux(stream.encode(av.VideoFrame.from_ndarray(picture(number), format="rgb24")))
        out.mux(stream.encode(None))


def assert_is(frames, first):
    """These are the pictures from number `first` on, and no others."""
    for step, frame in enumerate(frames[..., 0].astype(np.int16)):
        assert np.argmin(np.abs(EVERY - frame).sum(axis=(1, 2))) == (first + step) % 64


def assert_reads_right(path):
    with VideoReader(path) as reader:
        for start, count in ((0, 60), (17, 5), (59, 1), (3, 20), (44, 16), (1, 1)):
            assert_is(reader.read(start / FPS, count, FPS), start)


def test_any_range_of_frames_decodes_to_those_frames(clip):
    assert_reads_right(clip)


ENCODE = """
import hashlib, sys
from pathlib import Path
import numpy as np
from data.view import view
from data.video.encoding import VideoEncoding, write_video
from data.video.video import encode_mp4
from sim import clips

image = np.random.default_rng(0).integers(235, 255, (12, 160, 160, 3), np.uint8)
for t, picture in enumerate(image):
    picture[40 + 6 * t : 70 + 6 * t, 60:90] = (200, 30, 20)
    picture[30:60, 20 + 9 * t : 50 + 9 * t] = (20, 130, 20)
write_video(Path(sys.argv[1]), np.concatenate([image] * 3), 10, VideoEncoding())
shown = [encode_mp4(image, 10, options) for options in (clips.ENCODING, view._ENCODING)]
for made in (Path(sys.argv[1]).read_bytes(), *shown):
    print(hashlib.md5(made).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc fills memory that is given back")
def test_bytes_do_not_depend_on_what_was_in_memory(tmp_path):
    def made(filling):
        env = os.environ | {"MALLOC_PERTURB_": filling}
        command = [sys.executable, "-c", ENCODE, str(tmp_path / "a.mp4")]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout

    assert made("1") == made("85")


CODECS = {
    "h264": ("libx264", "x264-params", "log-level=none"),
    "h264 with B-frames": ("libx264", "x264-params", "log-level=none:bframes=3:b-pyramid=normal"),
    "h264, open": ("libx264", "x264-params", "log-level=none:bframes=3:open-gop=1"),
    "hevc": ("libx265", "x265-params", "log-level=none:pools=1:open-gop=0:bframes=0"),
    "hevc, open": ("libx265", "x265-params", "log-level=none:pools=1:open-gop=1:bframes=3"),
    "av1": ("libsvtav1", "svtav1-params", "lp=1"),
    "av1, open": ("libsvtav1", "svtav1-params", "lp=1:irefresh-type=1"),
}


@pytest.mark.parametrize("gop", [1, 2, 10, 250])
@pytest.mark.parametrize("codec", CODECS)
def test_episodes_at_every_start_decode_to_their_frames(tmp_path, codec, gop):
    encoder, key, value = CODECS[codec]
    if encoder != "libsvtav1":
        value += f":keyint={gop}:min-keyint=1:scenecut=0"
    encode(tmp_path / "a.mp4", encoder, {"g": str(gop), "crf": "20", key: value})
    with VideoReader(tmp_path / "a.mp4") as reader:
        for start in np.random.default_rng(0).permutation(60)[: 60 if gop <= 10 else 12]:
            count = min(3, 60 - start)
            assert_is(reader.read(start / FPS, count, FPS), start)


def test_open_groups_really_begin_with_frames_that_cannot_be_decoded(tmp_path):
    """Else the test above would not try what it is there for."""
    options = CODECS["hevc, open"][2] + ":keyint=10:min-keyint=10:scenecut=0"
    encode(tmp_path / "a.mp4", "libx265", {"g": "10", "x265-params": options})
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        packets = [p for p in container.demux(stream) if p.pts is not None]
        keys = [k for k, p in enumerate(packets) if p.is_keyframe and k]
        assert any(packets[k + 1].pts < packets[k].pts for k in keys)
        assert packets[0].dts < 0


def test_videos_of_29_97_fps_listed_as_30_are_counted_frame_by_frame(tmp_path):
    encode(tmp_path / "a.mp4", "libx264", {"g": "30"}, rate=Fraction(30000, 1001), frames=1200)
    with VideoReader(tmp_path / "a.mp4") as reader:
        assert_is(reader.read(0.0, 1200, 30), 0)
        assert_is(reader.read(700 * 1001 / 30000 + 0.012, 500, 30), 700)
        assert_is(reader.read(700 * 1001 / 30000 - 0.012, 5, 30), 700)


UNSTEADY = {
    "rounded to a coarse tick": (10_000, lambda k: np.round(k * 10_000 / 30)),
    "trembling": (
        1_000_000,
        lambda k: np.round(k * 1e6 / 30 + np.random.default_rng(0).uniform(-30, 30, len(k)) + 30),
    ),
    "trembling at 29.97 fps": (
        1_000_000,
        lambda k: np.round(k * 1.001e6 / 30 + np.random.default_rng(1).uniform(-90, 90, len(k))),
    ),
}


def encode_at(path, times, ticks):
    with av.open(str(path), "w", options={"video_track_timescale": str(ticks)}) as out:
        stream = out.add_stream("libx264", rate=30, options={"g": "30", "bf": "0"})
        stream.width = stream.height = SIZE
        stream.pix_fmt = "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, ticks)
        for number, time in enumerate(times):
            frame = av.VideoFrame.from_ndarray(picture(number), format="rgb24")
            frame.pts, frame.time_base = int(time), stream.time_base
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return path


@pytest.mark.parametrize("unsteady", UNSTEADY)
def test_frames_near_their_times_are_found_however_long_the_video(tmp_path, unsteady):
    ticks, times = UNSTEADY[unsteady]
    path = encode_at(tmp_path / "a.mp4", np.maximum(0, times(np.arange(1200))), ticks)
    with VideoReader(path) as reader:
        assert_is(reader.read(0.0, 1200, 30), 0)
    assert_is(seek_table(path).read(0.0, np.arange(1200), 30), 0)
    packets = Packets(path)
    for first, count in ((0, 1200), (1100, 100), (3, 7)):
        span = packets.span(0.0, first, count, 30)
        assert len([p for p in span.packets if p.pts >= span.first]) == count
    packets.close()


@pytest.mark.parametrize("lost", [40, 700, 1100])
def test_a_lost_frame_is_not_spread_over_the_others(tmp_path, lost):
    path = encode_at(tmp_path / "a.mp4", np.delete(np.arange(1300), lost) * 1000, 30_000)
    with VideoReader(path) as reader, pytest.raises(DatasetError, match="cannot be decoded"):
        reader.read(0.0, 1200, 30)
    table = seek_table(path)
    assert_is(table.read(0.0, np.arange(1150, 1200), 30), 1149)
    with pytest.raises(DatasetError, match="is not there"):
        table.read(0.0, np.array([lost]), 30)
    packets = Packets(path)
    with pytest.raises(DatasetError, match="does not hold frames 0 to 1199"):
        packets.span(0.0, 0, 1200, 30)
    packets.close()


VARIABLE = np.cumsum(np.r_[0, np.random.default_rng(0).uniform(0.07, 0.14, 39)])
LACKING = {
    "variable": (VARIABLE, 0.0, r" to 0\.1\d+ s apart \(a variable frame rate\), expected 0\.1 s"),
    "lost": (np.delete(np.arange(42), [9, 20]) / 10, 0.0, r"frames are lost, the first .* 0\.8 s"),
    "half": (np.arange(40) / 5, 0.0, r"its rate is 5 fps, expected 10; correct fps"),
    "short": (np.arange(40) / 10, 2.0, "it was cut off or damaged; copy or encode it again"),
}


@pytest.mark.parametrize("case", LACKING)
def test_a_video_that_lacks_frames_says_why(tmp_path, case):
    times, first, message = LACKING[case]
    path = encode_at(tmp_path / "a.mp4", np.round(times * 10_000), 10_000)
    with VideoReader(path) as reader, pytest.raises(DatasetError, match=message):
        reader.read(first, 40, FPS)
    with pytest.raises(DatasetError, match=message):
        seek_table(path).read(first, np.arange(40), FPS)
    with pytest.raises(DatasetError, match=message):
        Packets(path).span(first, 0, 40, FPS)


def test_videos_of_twice_the_rate_are_read_at_the_datasets(tmp_path):
    encode(tmp_path / "a.mp4", "libx264", {"g": "4"}, rate=2 * FPS)
    with VideoReader(tmp_path / "a.mp4") as reader:
        frames = reader.read(1.0, 10, FPS)
    for step in range(10):
        assert_is(frames[step : step + 1], 20 + 2 * step)


def test_a_start_that_drifted_by_less_than_half_a_frame_reads_the_nearest(clip):
    with VideoReader(clip) as reader:
        exact = reader.read(2.0, 4, FPS)
        for drift in (0.04, -0.04):
            assert np.array_equal(reader.read(2.0 + drift, 4, FPS), exact)


def test_frames_past_the_end_are_an_error_that_names_them(clip):
    with VideoReader(clip) as reader, pytest.raises(DatasetError, match=r"clip\.mp4, frame 60"):
        reader.read(5.0, 20, FPS)


def test_a_truncated_file_is_read_to_its_end_and_an_error_beyond(clip):
    whole = clip.read_bytes()
    clip.write_bytes(whole[: len(whole) * 2 // 3])
    with VideoReader(clip) as reader:
        assert reader.read(0.0, 5, FPS).shape == (5, SIZE, SIZE, 3)
        with pytest.raises(DatasetError, match="cut off or damaged"):
            reader.read(0.0, 60, FPS)


def test_a_file_without_its_index_is_no_video(clip):
    clip.write_bytes(clip.read_bytes()[:200])
    with pytest.raises(DatasetError, match=r"clip\.mp4, file: is not a readable video"):
        VideoReader(clip)


def test_no_frames_of_an_empty_episode_are_none(clip):
    with VideoReader(clip) as reader:
        assert reader.read(1.0, 0, FPS).shape == (0, SIZE, SIZE, 3)


def test_more_frames_than_a_file_has_are_refused_before_memory_is_asked_for(clip):
    with VideoReader(clip) as reader, pytest.raises(DatasetError, match="lists 60 frames"):
        reader.read(0.0, 2**31, FPS)


@pytest.mark.parametrize(
    ("codec", "options"), [("libx264", {"g": "2"}), ("libsvtav1", {"g": "2", "preset": "8"})]
)
def test_a_frame_whose_bits_are_damaged_is_refused(tmp_path, codec, options):
    path = tmp_path / "noise.mp4"
    noise = np.random.default_rng(0).integers(0, 256, (8, 128, 128, 3)).astype(np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=FPS, options=options)
        stream.width = stream.height = 128
        for frame in noise:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))
    content = bytearray(path.read_bytes())
    middle = content.index(b"mdat") + len(content) // 2
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)
    with VideoReader(path) as reader, pytest.raises(DatasetError, match="cannot be decoded"):
        reader.read(0.0, len(noise), FPS)
