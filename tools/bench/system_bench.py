#!/usr/bin/env python3
"""`make bench`: what the system itself costs. Writes {"figures": [{"name", "value", "unit"}]} and prints one table.

Two sources: programs of build/.../bin, which print such an object each, and a tenant in this process on a daemon
that the bench starts (plugin, client library, daemon, executor as they are used).
"""

import argparse
import os
import pathlib
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "demo"), str(ROOT / "torch_plugin" / "examples"), str(ROOT / "torch_plugin")]

from children import Daemon, DemoError, TenantProcess  # noqa: E402
from figures import BenchError, exit_code, print_table, run_programs, write  # noqa: E402

PROGRAMS = ("engine_bench", "executor_bench")

# What the project promises to measure, with its goal; other figures follow in the table.
PROMISED = {
    "submit_to_start_us_p50": "goal 15, at most 60 on 2 cores",
    "executor_over_direct_ratio": "at most 1.05",
    "round_us_p50": "",
    "round_us_p99": "",
    "plugin_call_overhead_us": "",
}
IDLE_SUBMITS = 1000
PAIRS = 400
LOAD_SECONDS = 6.0


class Tenant:
    """The demo's Llama on the daemon, in this process."""

    def __init__(self):
        from tenant import Tenant as DemoTenant

        import llama_serving as llama

        class OnlineTenant(DemoTenant):
            service_class = "online"

        self.tenant = OnlineTenant("bench", "cpu0", eager=False)
        self.tenant.connect([40])
        self.server = self.tenant.server
        self.prompt = llama.make_prompt(1, 40)

    def step(self, position):
        import torch

        with torch.inference_mode():
            self.server.step(torch.tensor([[7]]), position)

    def submit_to_start(self):
        """Microseconds from just before slice_submit to the start of the first operator; daemon and executor idle."""
        import slicescheduler
        from slicescheduler import _abi

        library, samples = slicescheduler.session(**self.tenant.options).connection().library, []
        submit = library.submit_raw
        called = [0]

        def timed(*arguments):
            called[0] = time.monotonic_ns()
            return submit(*arguments)

        library.submit_raw = timed
        try:
            for i in range(IDLE_SUBMITS):
                position = 40 + i % 500
                if position == 40:
                    self.server.answer(self.prompt, 1)  # the cache is empty again but for the prompt
                with slicescheduler.request() as request:
                    self.step(position)
                done = request.completions[0]
                if done.status == _abi.OK:
                    samples.append((done.start_ns - called[0]) / 1e3)
                time.sleep(0.002)  # all asleep again
        finally:
            library.submit_raw = submit
        return samples

    def call_overhead(self):
        """Microseconds of one decode call in this process besides submit and wait: with those replaced by functions that
        return at once, less the same call over a backend that does nothing. Medians of interleaved pairs."""
        import torch

        import llama_serving as llama
        import slicescheduler
        from slicescheduler.capture import capture_backend

        outputs = {}

        def nothing(captured):
            def run(arguments):
                if captured not in outputs:
                    symbols = captured.bind_symbols(arguments)
                    outputs[captured] = [
                        torch.zeros(layout.sizes, dtype=layout.dtype) if layout else None
                        for layout in captured.output_layouts(symbols)
                    ]
                return outputs[captured]
            return run

        torch._dynamo.reset()  # guards of both programs as after a fresh start
        empty = llama.Server(
            torch.compile(self.tenant.model, backend=capture_backend(nothing), fullgraph=True), llama.eager_cache(self.tenant.config)
        )
        ours = self.server
        library = slicescheduler.session(**self.tenant.options).connection().library
        token, times = torch.tensor([[7]]), ([], [])
        with torch.inference_mode():
            for server in (ours, empty):
                for position in (40, 41):
                    server.step(token, position)
            kept = library.submit_raw, library._wait
            library.submit_raw = library._wait = lambda *_: 0
            try:
                for _ in range(PAIRS):
                    for server, samples in zip((ours, empty), times):
                        begin = time.perf_counter_ns()
                        server.step(token, 42)
                        samples.append(time.perf_counter_ns() - begin)
            finally:
                library.submit_raw, library._wait = kept
        return (statistics.median(times[0]) - statistics.median(times[1])) / 1e3


def under_load(tenant, daemon, out):
    """`slicectl status` after some seconds of online requests here beside the demo's offline tenant."""
    print("  the same beside an offline tenant ...", file=sys.stderr, flush=True)
    env = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=str(ROOT / "torch_plugin"))
    offline = TenantProcess("offline", "offline", "cpu1", out, env, eager=False)
    try:
        offline.send("prepare", shapes=[(512, 6)], seed=1)
        offline.receive()
        offline.send("warm_up", rounds=1)
        offline.receive()
        offline.send("run", start_ns=0)
        end = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < end:
            tenant.tenant.answer(tenant.prompt, 10, deadline_ms=500)
            time.sleep(0.05)
        status = daemon.query("status")
        offline.send("stop")
        offline.receive()
        return status
    finally:
        offline.end()


def system_figures(build, out):
    with tempfile.TemporaryDirectory(prefix="slice-bench-") as folder:
        socket = pathlib.Path(folder) / "sliced.sock"
        daemon = Daemon(build, out, socket)
        os.environ["SLICE_SOCKET"] = str(socket)
        try:
            print("  a tenant on an idle daemon ...", file=sys.stderr, flush=True)
            tenant = Tenant()
            starts = sorted(tenant.submit_to_start())
            status = under_load(tenant, daemon, out)
            overhead = tenant.call_overhead()
            import slicescheduler

            slicescheduler.close_all()
        finally:
            daemon.end()
    figures = [
        {"name": "submit_to_start_us_p50", "value": starts[len(starts) // 2], "unit": "us"},
        {"name": "submit_to_start_us_p99", "value": starts[len(starts) * 99 // 100], "unit": "us"},
        {"name": "plugin_call_overhead_us", "value": overhead, "unit": "us"},
    ]
    figures += [
        {"name": f"round_us_{share}", "value": status[f"round_ns_{share}"] / 1e3, "unit": "us"} for share in ("p50", "p99")
    ]
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/bench/system.json")
    arguments = parser.parse_args()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figures = run_programs(arguments.build, PROGRAMS) + system_figures(arguments.build, arguments.out.parent)
    except (BenchError, DemoError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    write(figures, arguments.out)
    print_table(figures, PROMISED, arguments.out)
    return exit_code(figures, PROMISED)


if __name__ == "__main__":
    sys.exit(main())
