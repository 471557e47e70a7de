"""Datasets whose pictures are in parquet or in files instead of videos."""

import io
import json

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
