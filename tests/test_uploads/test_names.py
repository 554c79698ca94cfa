"""Accepted remote names, and those refused at the call."""

import pytest

from uploads.errors import InvalidRemoteNameError
from uploads.names import check_remote_name


@pytest.mark.parametrize(
    "name",
    [
        "modèle ünïcode/π and more.pt",
        "...",
        "x" * 1024,
        "50%/a+b&c=d#e?f",
    ],
)
def test_ordinary_and_odd_names_are_unchanged(name):
    """Unicode, spaces and 1,024 bytes are fine."""
    assert check_remote_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "a/../b",
        "/etc/x",
        "C:x",
        "a\\b",
        "a/",
        "nul\0",
        "x" * 1025,
        "\ud800",
        ".uploads-partial-1",
    ],
)
def test_names_that_could_leave_a_root_are_refused(name):
    """Absolute, climbing, empty, control characters and too long names are refused with the reason."""
    with pytest.raises(InvalidRemoteNameError, match="a remote name must"):
        check_remote_name(name)
