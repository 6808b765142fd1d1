"""Becomes another program that dies with the process which started it.

    python -I -S leash.py PARENT_PID PROGRAM ARGUMENT...

Run as a file, not imported: it must start in a moment, and between fork and exec of a process with
threads nothing may be done. Linux keeps the promise by itself (PR_SET_PDEATHSIG survives exec);
elsewhere this process stays, holds the program as its child, and watches its parent.
"""

import os
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
POLL_SECONDS = 0.5
"""Elsewhere: how long a program may outlive its parent."""


def main(parent: int, command: list[str]) -> int:
    """Returns only where the program could not be replaced, with the program's exit code."""
    if sys.platform != "linux":
        return watch(parent, command)
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before we asked to be told
        return 1
    os.execv(command[0], command)


def watch(parent: int, command: list[str]) -> int:
    """Hold the program as a child until it or our parent ends."""
    with subprocess.Popen(command) as child:
        signal.signal(signal.SIGTERM, lambda *_: child.terminate())
        while child.poll() is None:
            if os.getppid() != parent:
                child.kill()
            time.sleep(POLL_SECONDS)
        return child.returncode


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
