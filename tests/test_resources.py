from pathlib import Path

import pytest

from kvprofile.errors import KvprofileError
from kvprofile.resources import find, resource


def test_both_bundled_folders_are_found() -> None:
    assert (resource("recipes") / "demo.yaml").is_file()
    assert (resource("datasets") / "hotpotqa_profile.jsonl").is_file()


def test_a_missing_folder_names_the_mend() -> None:
    with pytest.raises(KvprofileError, match="lacks its bundled nothing: pip install"):
        resource("nothing")


def test_the_first_folder_that_has_the_path_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    (second / "x").touch()
    assert find("x", (first, second)) == second / "x"
    (first / "x").touch()
    assert find("x", (first, second)) == first / "x"
    assert find("y", (first, second)) is None
    assert find(str(second / "x"), (first,)) == second / "x"
