"""Ways to damage a copy of a recording."""

import json
import shutil

import pyarrow as pa
import pyarrow.parquet as pq


def edit_column(root, file, name, edit):
    table = pq.read_table(root / file)
    values, kind = edit(table[name].to_pylist(), table[name].type)
    at = table.column_names.index(name)
    pq.write_table(table.set_column(at, name, pa.array(values, kind)), root / file)


def change(position, value):
    def edit(values, kind):
        values[position] = value
        return values, kind

    return edit


def rename_columns(root, out, names):
    """A copy in which columns have other names."""
    shutil.copytree(root, out)
    for file in ("checksums", "stats"):
        (out / f"meta/{file}.json").unlink(missing_ok=True)
    for file in out.glob("data/*/*.parquet"):
        table = pq.read_table(file)
        pq.write_table(table.rename_columns([names.get(n, n) for n in table.column_names]), file)
    info = json.loads((out / "meta/info.json").read_text())
    info["features"] = {names.get(name, name): told for name, told in info["features"].items()}
    (out / "meta/info.json").write_text(json.dumps(info))
    return out
