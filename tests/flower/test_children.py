"""Processes that end with the one that started them."""

import subprocess
import sys

CHILD = """
import time
from bespoke.flower.children import end_as_asked
end_as_asked()
print("up", flush=True)
time.sleep(30)
print("survived", flush=True)
"""
PARENT = f"""
import os, subprocess, sys
subprocess.run([sys.executable, "-c", {CHILD!r}], env=os.environ | {{"BESPOKE_PARENT": str(os.getpid())}})
"""


def test_a_command_ends_when_its_parent_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout.readline() == "up\n"
        parent.kill()
        assert parent.stdout.read() == ""  # which returns when the child has ended too
