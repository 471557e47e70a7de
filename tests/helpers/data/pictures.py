"""Pictures of datasets: in parquet, in files, or in videos of any codec."""

import io
import json

import av
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.helpers.data.recording import PARQUET


def set_column(path, name, values, kind=None):
    table = pq.read_table(path)
    column = values if isinstance(values, pa.Array) else pa.array(values, kind)
    at = table.column_names.index(name) if name in table.column_names else len(table.column_names)
    table = table.drop([name]) if name in table.column_names else table
    pq.write_table(table.add_column(at, name, column), path)


def edit_info(root, edit):
    info = json.loads((root / "meta/info.json").read_text())
    edit(info)
    (root / "meta/info.json").write_text(json.dumps(info))


def add_feature(root, name, values, feature):
    set_column(root / PARQUET, name, values)
    edit_info(root, lambda info: info["features"].update({name: feature}))


def png(picture):
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "PNG")
    return buffer.getvalue()


def stored_in_parquet(root, cells):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    add_feature(
        root,
        "observation.images.top",
        pa.array(cells, kind),
        {"dtype": "image", "shape": [3, 48, 64], "names": ["c", "h", "w"]},
    )
    return "observation.images.top"


def encode(path, frames, encoder, options):
    """Writes frames [t, h, w, 3] as a video at 20 frames a second."""
    with av.open(str(path), "w") as out:
        stream = out.add_stream(encoder, rate=20, options=options)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        out.mux(stream.encode(None))
