"""A child of a zygote: when it ends while it works."""

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere SIGIO ends no process by default")

WORK = """
from redrafter.sandbox.child import bounded_work
from redrafter.sandbox.frames import FrameSocket

ours, theirs = FrameSocket.pair()
with bounded_work(10.0, theirs):
    {event}
"""


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ("ours.sendall(b'x')", 0),  # as the kernel may report data that were read before
        ("ours.shutdown(2)", -signal.SIGIO),
        ("ours.close()", -signal.SIGIO),
    ],
)
def test_work_ends_where_the_other_end_closes_and_not_with_data(event, code):
    ended = subprocess.run([sys.executable, "-c", WORK.format(event=event)], capture_output=True, check=False)
    assert ended.returncode == code, ended.stderr
