#!/usr/bin/env python3
"""Runs a command with a real daemon behind $SLICE_TEST_SOCKET: the plugin's runtime tests then use it instead of their fake.

    on_daemon.py BUILD_FOLDER COMMAND...

Exit status: the command's; 1 when the daemon cannot be started, died meanwhile, or does not stop when asked.
"""

import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools" / "demo"))

from children import Daemon, DemoError, log_end  # noqa: E402


def main():
    build, command = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:]
    with tempfile.TemporaryDirectory(prefix="slice-test-") as folder:
        folder = pathlib.Path(folder)
        try:
            daemon = Daemon(build, folder, folder / "sliced.sock")
        except DemoError as error:
            print(f"on_daemon: {error}", file=sys.stderr)
            return 1
        try:
            code = subprocess.run(command, env=dict(os.environ, SLICE_TEST_SOCKET=str(daemon.socket))).returncode
            daemon.check_alive()
        except DemoError as error:
            print(f"on_daemon: {error}", file=sys.stderr)
            code = 1
        finally:
            stopped = daemon.end()
        if stopped != 0:
            print(f"on_daemon: sliced did not stop cleanly on SIGTERM (code {stopped}){log_end(daemon.log)}", file=sys.stderr)
        return code or (1 if stopped != 0 else 0)


if __name__ == "__main__":
    sys.exit(main())
