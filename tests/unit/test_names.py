"""Hidden names are told apart from checkpoints, and no name leads out of a directory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.errors import ConfigError
from ckpt_engine.storage.backend import basename, parent
from ckpt_engine.storage.names import check_destination, check_file_name, check_id, hidden, parse_hidden

ids = st.text("abcXYZ019_-", min_size=1, max_size=64)
visible = st.text("ab.=-_ 1", min_size=1, max_size=20).filter(lambda name: name.strip("."))


@given(visible, st.sampled_from(["incomplete", "replaced"]), ids)
def test_a_hidden_name_tells_its_checkpoint_and_lies_beside_it(name: str, kind: str, save_id: str) -> None:
    path = hidden(f"s3://bucket/run/{name}", kind, save_id)  # type: ignore[arg-type]
    assert parent(path) == "s3://bucket/run"
    assert parse_hidden(basename(path)) == (name, kind)


@pytest.mark.parametrize("name", ["a.ckpt", ".a.ckpt", "a.incomplete-1", ".a.incomplete", ".a.other-1", ""])
def test_other_names_are_not_hidden_ones(name: str) -> None:
    assert parse_hidden(name) is None


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "a\\b", "a\0", ".x", "a..b", "a\n", "ä", "a b"])
def test_names_that_lead_elsewhere_are_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        check_file_name(name)


@pytest.mark.parametrize("save_id", ["", "a/b", "..", "a.b", "x" * 65, "a\n"])
def test_ids_that_are_no_part_of_a_file_name_are_refused(save_id: str) -> None:
    with pytest.raises(ConfigError):
        check_id(save_id)


def test_a_destination_needs_a_name() -> None:
    assert check_destination("s3://bucket/run/a.ckpt") == "s3://bucket/run/a.ckpt"
    for bad in ("", "/", ".", "runs/..", "memory://"):
        with pytest.raises(ConfigError):
            check_destination(bad)
