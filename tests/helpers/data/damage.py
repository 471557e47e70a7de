"""Ways to damage a copy of a recording."""

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
