import pytest

from stepwell.data.files import new_folder
from stepwell.types import DataError


def test_the_folder_appears_whole_at_the_end(tmp_path):
    target = tmp_path / "deep" / "folder"
    with new_folder(target) as temporary:
        (temporary / "a").write_text("x")
        assert not target.exists()
    assert (target / "a").read_text() == "x"
    assert [p.name for p in target.parent.iterdir()] == ["folder"]


def test_an_error_leaves_nothing(tmp_path):
    def fail():
        with new_folder(tmp_path / "f") as temporary:
            (temporary / "a").write_text("x")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_disk_errors_name_the_target(tmp_path):
    def write_to_a_full_device():
        with new_folder(tmp_path / "f"), open("/dev/full", "w") as file:
            file.write("x" * 100_000)

    with pytest.raises(DataError, match=r"cannot write .*/f: No space left on device"):
        write_to_a_full_device()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot write"), new_folder(tmp_path / "file" / "f"):
        pass
