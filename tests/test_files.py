import errno

import pytest

from stepwell.files import whole_file, write_text


def write_half(path, error):
    with whole_file(path) as temporary:
        temporary.write_text("half")
        raise error


def test_a_file_is_new_or_as_it_was(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_text(path, "één")
    assert path.read_bytes() == "één".encode()
    with pytest.raises(KeyError):
        write_half(path, KeyError())
    assert path.read_text("utf-8") == "één"
    assert list(path.parent.iterdir()) == [path]


def test_a_full_disk_names_the_file(tmp_path):
    with pytest.raises(OSError, match="No space left") as caught:
        write_half(tmp_path / "file", OSError(errno.ENOSPC, "No space left on device"))
    assert caught.value.filename == str(tmp_path / "file")
    assert list(tmp_path.iterdir()) == []
