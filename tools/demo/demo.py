#!/usr/bin/env python3
"""The demo: two online tenants and one offline tenant share two CPU devices through one daemon, under three policies.

`make demo` builds what is needed and runs this. The tenants are ordinary scripts (torch_plugin/examples); the same
tenants and the same daemon live through all phases; only the policy changes. Every answer is compared with plain
PyTorch's; one difference and the demo fails.
"""

import argparse
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time

import arrivals
import report
import timeline_plot
from children import Daemon, DemoError, TenantProcess, gather
from progress import Progress

ROOT = pathlib.Path(__file__).resolve().parents[2]
POLICIES = ("online-only", "fifo", "slice")
DEADLINE_FACTOR = 2.5           # x the unloaded time
SHAPES = 24                     # different online prompts per tenant
# Long prompts in chunks of 128 tokens, short answers; worked through again and again.
OFFLINE_SHAPES = [(512, 6), (384, 4), (448, 8), (300, 5), (512, 4), (420, 6)]
PHASE_SECONDS = (14.0, 22.0)    # shortest, longest; see phase_seconds
WARM_UP_ROUNDS = 10
WINDOW_SECONDS = 4.0            # of each phase in timeline.png


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release", help="build folder")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/demo", help="folder of the results")
    parser.add_argument("--trace", type=pathlib.Path, metavar="FILE",
                        help="arrivals from a CSV (arrival_ms,input_tokens,output_tokens), scaled to the demo's model "
                             "and time, instead of the built-in bursts")
    parser.add_argument("--requests", type=int, default=62, help="per online tenant and policy")
    parser.add_argument("--load", type=float, default=0.42, help="share of the time that an online tenant has work")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--eager", action="store_true",
                        help="no daemon: the same tenants on plain PyTorch, side by side, for comparison")
    arguments = parser.parse_args()
    arguments.build, arguments.out = arguments.build.resolve(), arguments.out.resolve()
    if arguments.requests < 1 or not 0 < arguments.load <= 1:
        parser.error("--requests must be at least 1, --load between 0 and 1")
    return arguments


def make_loads(arguments):
    """One Load per online tenant; the same for every policy."""
    if arguments.trace is None:
        return [arrivals.bursty(arguments.seed * 100 + i, arguments.requests, SHAPES) for i in range(2)]
    rows = arrivals.read_trace(arguments.trace)
    loads = [arrivals.from_trace(rows, i, 2, arguments.requests, SHAPES) for i in range(2)]
    print(arrivals.trace_note(rows[: 2 * arguments.requests]), flush=True)
    return loads


def phase_seconds(loads, unloaded, load):
    """How long a phase must be for this machine, so that online work fills about `load` of the time."""
    work = max(sum(times[case] for _, case in one.requests) / 1e3 for one, times in zip(loads, unloaded))
    return min(max(work / load, PHASE_SECONDS[0]), PHASE_SECONDS[1])


def tenant_environment():
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "torch_plugin"), env.get("PYTHONPATH")]))
    return env


class Demo:
    def __init__(self, arguments):
        self.arguments = arguments
        self.policies = ("eager",) if arguments.eager else POLICIES
        self.loads = make_loads(arguments)
        self.children = []
        self.daemon = None
        seconds = sum(PHASE_SECONDS) / 2
        self.progress = Progress([
            ("starting the daemon and three tenants", 10), ("expected answers from plain PyTorch", 8),
            *((f"warm-up of {name}", 8) for name in ("online-a", "online-b", "offline")),
            *((f"policy {policy}", seconds) for policy in self.policies),
            ("checking answers, writing the report", 5),
        ])

    def run(self):
        out = self.arguments.out
        out.mkdir(parents=True, exist_ok=True)
        self.progress.begin()
        with tempfile.TemporaryDirectory(prefix="slice-demo-") as folder:  # socket paths have a length limit
            try:
                self._start(pathlib.Path(folder) / "sliced.sock")
                self._prepare()
                phases = [self._phase(policy) for policy in self.policies]
                return self._finish(phases)
            finally:
                self.progress.end()
                for child in reversed(self.children):
                    child.end()

    def _start(self, socket):
        out, env = self.arguments.out, tenant_environment()
        if not self.arguments.eager:
            env["SLICE_SOCKET"] = str(socket)
            self.daemon = Daemon(self.arguments.build, out, socket)
            self.children.append(self.daemon)
        for name, service_class, home in (
            ("online-a", "online", "cpu0"), ("online-b", "online", "cpu1"), ("offline", "offline", "cpu1"),
        ):
            self.children.append(TenantProcess(name, service_class, home, out, env, self.arguments.eager))
        self.tenants = [child for child in self.children if isinstance(child, TenantProcess)]
        self.online, self.offline = self.tenants[:2], self.tenants[2]

    def _gather(self, tenants, timeout):
        return gather(tenants, timeout, self.progress.tick, self.children)

    def _prepare(self):
        self.progress.begin()
        shapes = [[(s.input_tokens, s.output_tokens) for s in load.shapes] for load in self.loads] + [OFFLINE_SHAPES]
        for i, (tenant, mine) in enumerate(zip(self.tenants, shapes)):
            tenant.send("prepare", shapes=mine, seed=self.arguments.seed * 10 + i)
        self._gather(self.tenants, 180)
        self.unloaded = []
        for tenant in self.tenants:  # one at a time: what is measured here is an idle machine
            self.progress.begin()
            tenant.send("warm_up", rounds=WARM_UP_ROUNDS if tenant.service_class == "online" else len(OFFLINE_SHAPES))
            self.unloaded.append(self._gather([tenant], 180)[0]["unloaded_ms"])
        seconds = phase_seconds(self.loads, self.unloaded[:2], self.arguments.load)
        self.loads = arrivals.stretch(self.loads, seconds)
        if self.daemon:
            self.daemon.slicectl("timeline", "start")

    def _counters(self):
        if self.daemon is None:
            return None
        return report.counters(self.daemon.query("status"), self.daemon.query("devices")["devices"])

    def _phase(self, policy):
        self.progress.begin(f"({len(self.loads[0].requests) + len(self.loads[1].requests)} requests)")
        if self.daemon:
            self.daemon.slicectl("policy", "set", policy)
            self.daemon.slicectl("timeline", "mark", timeline_plot.MARK_PREFIX + policy)
        before = self._counters()
        start_ns = time.monotonic_ns()
        if policy == self.policies[0]:  # and then on, through all phases
            self.offline.send("run", start_ns=start_ns)
        for tenant, load in zip(self.online, self.loads):
            tenant.send("run", start_ns=start_ns, requests=load.requests, deadline_factor=DEADLINE_FACTOR)
        answers = self._gather(self.online, 120)
        phase = report.Phase(policy, start_ns, time.monotonic_ns(), sum((a["results"] for a in answers), []), before)
        phase.after = self._counters()
        return phase

    def _finish(self, phases):
        self.progress.begin()
        if self.daemon:
            self.daemon.slicectl("policy", "set", "slice")  # parked offline work must get an end
        self.offline.send("stop")
        offline = self._gather([self.offline], 60)[0]
        for tenant in self.tenants:
            tenant.send("check")
        checks = self._gather(self.tenants, 60)
        timeline = self.arguments.out / "timeline.json"
        if self.daemon:
            self.daemon.slicectl("timeline", "stop", str(timeline))
        bypassed = sum(check["bypassed"] for check in checks)
        result = {
            "answers_checked": sum(check["checked"] for check in checks),
            "answers_wrong": sum(check["wrong"] for check in checks),
            "recompiles_after_warmup": sum(check["recompiles"] for check in checks),
            "policies": {phase.policy: report.figures(phase, offline["steps"], bypassed) for phase in phases},
            "deadline_factor": DEADLINE_FACTOR,
            "arrivals": str(self.arguments.trace or f"bursts, seed {self.arguments.seed}"),
            "processors": os.cpu_count(),
        }
        report.write(self.arguments.out / "report.json", result)
        files = ["report.json"]
        if self.daemon:
            self._draw(timeline, result["policies"])
            files += ["timeline.json", "timeline.png"]
        self.progress.end()
        examples = [f"{tenant.name}: {line}" for tenant, check in zip(self.tenants, checks) for line in check["examples"]]
        return result, examples, files

    def _draw(self, timeline, policies):
        names, spans, marks = timeline_plot.read(timeline)
        times = [[at for at, _ in load.requests] for load in self.loads]
        offset = timeline_plot.liveliest(times, WINDOW_SECONDS, max(map(max, times)))
        titles = [
            (name, f"{name}: online p90 {f['online_p90_ms']:.0f} ms, offline {f['offline_tokens_per_s']:,.0f} tokens/s")
            for name, f in policies.items()
        ]
        timeline_plot.draw(
            names, spans, marks, titles, (offset, WINDOW_SECONDS), self.arguments.out / "timeline.png"
        )


def verdict(result, examples):
    """Lines that say whether the run is valid, and the exit code."""
    lines = [f"answers: {result['answers_checked']} checked against plain PyTorch, {result['answers_wrong']} wrong; "
             f"recompiles after warm-up: {result['recompiles_after_warmup']}"]
    lines += [f"  WRONG {line}" for line in examples]
    bypassed = max(f["ops_bypassed"] for f in result["policies"].values())
    failed = result["answers_wrong"] or result["recompiles_after_warmup"] or bypassed
    if failed:
        lines.append("demo FAILED: wrong answers, recompiles or operators outside the scheduler (see above)")
    return lines, 1 if failed else 0


def main():
    arguments = parse_arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        demo = Demo(arguments)
        result, examples, files = demo.run()
    except (DemoError, ValueError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
        return 130
    print(report.table(result["policies"]))
    for line in report.comparison(result["policies"]):
        print(line)
    lines, code = verdict(result, examples)
    print("\n".join(lines))
    width = shutil.get_terminal_size().columns
    print("files:"[:width], " ".join(os.path.relpath(arguments.out / name) for name in files))
    return code


if __name__ == "__main__":
    sys.exit(main())
