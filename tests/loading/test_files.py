"""Reading within limits, and text that is safe to print."""

import sys

import pytest

from minivllm.files import MAX_MESSAGE_CHARS, printable, printable_errors, read_bytes, read_json, read_text


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Grüße, 東京 👍", "Grüße, 東京 👍"),
        ("a\x1b[2Jb\x07\r\n\tc", r"a\x1b[2Jb\x07\r\n\tc"),
        ("a\u202eb\u200bc", r"a\u202eb\u200bc"),
        ("a\ud800b", r"a\ud800b"),
        ("\x9b31m", r"\x9b31m"),  # a control sequence in one character
    ],
)
def test_printable(text, expected):
    assert printable(text) == expected
    printable(text).encode()


def test_every_character_is_printable_afterwards():
    text = "".join(map(chr, range(sys.maxunicode + 1)))
    for start in range(0, len(text), MAX_MESSAGE_CHARS):
        part = printable(text[start : start + MAX_MESSAGE_CHARS])
        assert part.isprintable()
        part.encode()
    assert printable(text) == f"{printable(text[:MAX_MESSAGE_CHARS])}..."


def test_printable_errors():
    fine = ValueError("fine")
    with pytest.raises(ValueError) as error, printable_errors():
        raise fine
    assert error.value is fine
    with pytest.raises(ValueError, match=r"^\\x07$"), printable_errors():
        raise ValueError("\x07")
    with pytest.raises(KeyError), printable_errors():
        raise KeyError("\x07")


def test_a_file_may_have_as_much_as_its_limit(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"x" * 2_000_000)
    assert len(read_bytes(path, 2_000_000)) == 2_000_000
    for read in (read_bytes, read_text, read_json):
        with pytest.raises(ValueError, match=rf"^{path} is larger than 1 MB, the most that is read of such a file"):
            read(path, 1_999_999)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "nothing", tmp_path / ("x" * 5000), tmp_path / "a\0b", tmp_path / "\ud800"):
        assert read_json(path) is None
        with pytest.raises(ValueError, match=r"(is not a regular file|cannot be read: No such file or directory)$"):
            read_text(path)
