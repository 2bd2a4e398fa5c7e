"""How the demo's driver talks to a tenant: one JSON object per line on standard input, one answer per line on standard
output. Nothing of SliceScheduler in here.

A tenant passes `serve` a function per command. `stop` is different: it may come while a command runs, and only sets
`Link.stopping`.
"""

import json
import os
import queue
import sys
import threading
import traceback


class Link:
    def __init__(self):
        # Libraries print to standard output now and then: the driver's line stays ours, theirs goes to the log.
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._commands = queue.SimpleQueue()
        self.stopping = threading.Event()
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def _read(self):
        for line in sys.stdin:
            message = json.loads(line)
            if message["do"] == "stop":
                self.stopping.set()
            else:
                self.stopping.clear()
                self._commands.put(message)
        self.stopping.set()
        self._commands.put(None)  # the driver is gone

    def _send(self, message):
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()

    def serve(self, commands):
        """Runs commands until the driver closes the line. `commands`: name -> function(**fields) -> dict."""
        while (message := self._commands.get()) is not None:
            name = message.pop("do")
            try:
                self._send({"ok": True, **commands[name](**message)})
            except Exception as error:  # the driver decides; the log has the rest
                traceback.print_exc()
                self._send({"ok": False, "error": f"{type(error).__name__}: {error}"})
