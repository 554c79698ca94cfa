"""What is logged is what our packages log; servers and queues for tests of uploads."""

from tests.our_log import caplog
from tests.test_uploads.conftest import (
    _credentials,
    _home,
    gate,
    make_file,
    make_queue,
    moto,
    prefix,
    proxy,
    rclone,
    s3,
    sshd_login,
)

__all__ = [
    "_credentials",
    "_home",
    "caplog",
    "gate",
    "make_file",
    "make_queue",
    "moto",
    "prefix",
    "proxy",
    "rclone",
    "s3",
    "sshd_login",
]
