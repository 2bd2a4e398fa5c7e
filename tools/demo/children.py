"""The demo's child processes: tenants that speak JSON lines, and the daemon with its command line tool.

Every failure raises DemoError with what failed, the end of the child's log, and where the rest is.
"""

import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "torch_plugin" / "examples"

CONFIG = """\
# Written by tools/demo: two CPU devices with a memory domain each; whoever starts the demo may be online.
[daemon]
socket = "{socket}"

[[domain]]
name = "cpu0"
pool = "256MiB"
retained = "1GiB"

[[domain]]
name = "cpu1"
pool = "256MiB"
retained = "1GiB"

[[device]]
name = "cpu0"
ordinal = 0

[[device]]
name = "cpu1"
ordinal = 1

[scheduler]
policy = "slice"

[tenant_defaults]
class = "online"
"""


class DemoError(Exception):
    pass


def log_end(path, lines=12):
    text = path.read_text(errors="replace").splitlines()[-lines:] if path.exists() else []
    return "".join(f"\n    | {line}" for line in text) + f"\n  whole log: {path}"


class Child:
    """A process with its standard error in `log`. It ends with us: SIGTERM first, SIGKILL after `grace` seconds."""

    def __init__(self, name, command, log, env, **pipes):
        self.name = name
        self.log = log
        with open(log, "wb") as errors:
            self.process = subprocess.Popen(command, stderr=errors, env=env, **pipes)

    def check_alive(self):
        code = self.process.poll()
        if code is not None:
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            raise DemoError(f"{self.name} {how}{log_end(self.log)}")

    def end(self, grace=10.0):
        """Exit code, None if it had to be killed."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(grace)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return None


class TenantProcess(Child):
    def __init__(self, name, service_class, home, folder, env, eager):
        command = [sys.executable, str(EXAMPLES / f"{service_class}_tenant.py"), "--name", name, "--home", home]
        super().__init__(
            name, command + (["--eager"] if eager else []), folder / f"{name}.log", env,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        self.service_class = service_class
        self.home = home

    def send(self, do, **fields):
        try:
            self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            self.process.wait(5)
            self.check_alive()

    def receive(self):
        """The answer to the last command; blocks. Errors: DemoError when the tenant failed or ended."""
        line = self.process.stdout.readline()
        if not line:
            self.process.wait(5)
            self.check_alive()
            raise DemoError(f"{self.name} closed its line{log_end(self.log)}")
        answer = json.loads(line)
        if not answer.pop("ok"):
            raise DemoError(f"{self.name} failed: {answer['error']}{log_end(self.log)}")
        return answer


def gather(tenants, timeout, tick, watched=()):
    """Answers of `tenants`, in their order. Calls tick() about five times a second and looks after `watched` children.

    Errors: DemoError when one fails or takes more than `timeout` seconds."""
    answers, end = {}, time.monotonic() + timeout
    busy = [child for child in watched if isinstance(child, TenantProcess) and child not in tenants]
    with selectors.DefaultSelector() as selector:
        for tenant in (*tenants, *busy):
            selector.register(tenant.process.stdout, selectors.EVENT_READ, tenant)
        while len(answers) < len(tenants):
            for key, _ in selector.select(0.2):
                answer = key.data.receive()
                if key.data in busy:
                    raise DemoError(f"{key.data.name} ended its work unasked{log_end(key.data.log)}")
                answers[key.data] = answer
                selector.unregister(key.fileobj)
            tick()
            for child in watched:
                child.check_alive()
            if time.monotonic() > end:
                late = [tenant for tenant in tenants if tenant not in answers]
                raise DemoError(
                    f"no answer within {timeout:.0f} s from {', '.join(t.name for t in late)}{log_end(late[0].log)}"
                )
    return [answers[tenant] for tenant in tenants]


class Daemon(Child):
    """One sliced with `device_count` CPU devices on a socket of its own."""

    def __init__(self, build, folder, socket):
        binaries = build / "bin"
        missing = [str(binaries / name) for name in ("sliced", "slicectl") if not (binaries / name).exists()]
        if missing:
            raise DemoError(f"not built: {', '.join(missing)} (make demo builds them)")
        self.slicectl_path = binaries / "slicectl"
        self.socket = socket
        config = folder / "sliced.toml"
        config.write_text(CONFIG.format(socket=socket))
        super().__init__("sliced", [str(binaries / "sliced"), "--config", str(config)], folder / "sliced.log", dict(os.environ))
        end = time.monotonic() + 20
        while not socket.exists() or not self.answers():
            self.check_alive()
            if time.monotonic() > end:
                raise DemoError(f"sliced does not answer on {socket} after 20 s{log_end(self.log)}")
            time.sleep(0.05)

    def answers(self):
        return self._run("status").returncode == 0

    def _run(self, *arguments):
        command = [str(self.slicectl_path), "--socket", str(self.socket), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=30)

    def slicectl(self, *arguments):
        """Standard output. Errors: DemoError with what it printed."""
        done = self._run(*arguments)
        if done.returncode != 0:
            raise DemoError(f"slicectl {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def query(self, what):
        """`slicectl status|devices|tenants` as an object."""
        return json.loads(self.slicectl("--json", what))
