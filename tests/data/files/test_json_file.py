"""JSON of others that is nested deep is refused in a sentence by whoever reads it."""

import json

import pytest

from data.files.json_file import read_json as read_data_json
from data.mixture.mixture import read_mixture
from data.store.checked_tables import read_json as read_store_json
from models.files.foreign_json import DEEPEST, loads, read_json
from parallel.planning.cluster import read_cluster


@pytest.mark.parametrize("depth", [DEEPEST + 1, 900, 100_000])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", read_json),
        ("info.json", lambda file: read_data_json(file, file, "copy it again")),
        ("store.json", lambda file: read_store_json(file.read_bytes(), file)),
        ("mixture.json", lambda file: read_mixture(str(file))),
        ("cluster.json", lambda file: read_cluster(file)),
    ],
)
@pytest.mark.parametrize("pair", [("[", "]"), ('{"a": ', "}")], ids=["lists", "objects"])
def test_deep_nesting_is_refused_by_the_name_of_the_file(tmp_path, name, read, pair, depth):
    begin, end = pair
    (tmp_path / name).write_text(f'{{"a": {begin * depth}1{end * depth}}}')
    with pytest.raises(ValueError, match=f"{name}.*nested too deep"):
        read(tmp_path / name)


def test_a_mixture_in_toml_that_is_nested_deep_is_refused(tmp_path):
    (tmp_path / "mixture.toml").write_text("datasets = " + "[" * 5000)
    with pytest.raises(ValueError, match=r"mixture\.toml: is not valid TOML"):
        read_mixture(str(tmp_path / "mixture.toml"))


def test_brackets_within_texts_are_no_levels():
    value = {"a": ["[{" * 500, '"' + "[" * 200, "\\"], "b": [[]] * 500}
    assert loads(json.dumps(value)) == value
    deepest = "[" * DEEPEST + "]" * DEEPEST
    assert json.dumps(loads(deepest)) == deepest
    for text in ('"' + "\\" * 1001, '"a' * 1001, "[" * 101 + '"\\'):
        with pytest.raises(ValueError, match=r"Unterminated|Extra data|nested too deep"):
            loads(text)
