"""What all commands have in common."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("words", [["--help"], ["--version"]])
def test_a_reader_that_leaves_is_no_error(words):
    """As `head` does when it has seen enough."""
    command = [sys.executable, "-m", "deqkit", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 0
