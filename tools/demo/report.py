"""Figures of the demo's phases, the table on the screen, and report.json. Pure but for writing files."""

import dataclasses
import json


def percentile(values, share):
    """Linear between the two nearest; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * share
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclasses.dataclass
class Phase:
    """What one policy's phase left behind. before, after: counters(); None without a daemon."""

    policy: str
    start_ns: int
    end_ns: int
    online: list      # results of all online tenants' requests
    before: dict = None
    after: dict = None
    note: str = ""

    @property
    def seconds(self):
        return (self.end_ns - self.start_ns) / 1e9


def counters(status, devices):
    """The running totals that a phase is measured by, from `slicectl status` and `slicectl devices`."""
    counted = ("ops_executed", "transfers", "offline_ops", "offline_ops_off_home", "recalls", "deferrals")
    return {
        **{name: status["counters"][name] for name in counted},
        "busy_ns": [device["busy_ns"] for device in devices],
        "cpu_ns": [device["cpu_ns"] for device in devices],
    }


def prediction_errors(results):
    """Of each graph run, percent of its duration: finish as predicted at submit against the actual one."""
    errors = []
    for result in results:
        for submit, finish, predicted in result["runs"]:
            if predicted and finish > submit:
                errors.append(abs(predicted - finish) / (finish - submit) * 100)
    return errors


def figures(phase, offline_steps, bypassed):
    """One policy's entry in report.json. offline_steps: [(ns, tokens)] of the whole run."""
    latency = [(r["finish_ns"] - r["arrival_ns"]) / 1e6 for r in phase.online]
    first = [(r["first_ns"] - r["arrival_ns"]) / 1e6 for r in phase.online]
    online_tokens = sum(r["input_tokens"] + r["output_tokens"] for r in phase.online)
    offline_tokens = sum(tokens for ns, tokens in offline_steps if phase.start_ns <= ns < phase.end_ns)
    met = sum(r["finish_ns"] <= r["deadline_ns"] for r in phase.online)
    out = {
        "online_tokens_per_s": online_tokens / phase.seconds,
        "offline_tokens_per_s": offline_tokens / phase.seconds,
        "online_p50_ms": percentile(latency, 0.50),
        "online_p90_ms": percentile(latency, 0.90),
        "online_p99_ms": percentile(latency, 0.99),
        "ttft_p50_ms": percentile(first, 0.50),
        "ttft_p90_ms": percentile(first, 0.90),
        "ttft_p99_ms": percentile(first, 0.99),
        "deadline_attainment": met / len(phase.online),
        "device_utilisation": None,
        "device_cpu_utilisation": None,
        "ops_executed": None,
        "ops_bypassed": bypassed,
        "transfers": None,
        "offline_ops_off_home_pct": None,
        "prediction_error_pct": percentile(prediction_errors(phase.online), 0.50),
        "online_requests": len(phase.online),
        "seconds": phase.seconds,
    }
    if phase.before is not None:
        def grown(key):
            return phase.after[key] - phase.before[key]

        def shares(key):
            pairs = zip(phase.before[key], phase.after[key])
            return [(after - before) / 1e9 / phase.seconds for before, after in pairs]

        offline_ops = grown("offline_ops")
        out.update(
            device_utilisation=shares("busy_ns"),
            device_cpu_utilisation=shares("cpu_ns"),
            ops_executed=grown("ops_executed"),
            transfers=grown("transfers"),
            recalls=grown("recalls"),
            deferrals=grown("deferrals"),
            offline_ops_off_home_pct=100 * grown("offline_ops_off_home") / offline_ops if offline_ops else 0.0,
        )
    return out


def _number(value, digits=0):
    return "-" if value is None else f"{value:,.{digits}f}"


def _percent(value, digits=0):
    return "-" if value is None else f"{value * 100:.{digits}f} %"


ROWS = [
    ("online tokens/s", lambda f: _number(f["online_tokens_per_s"])),
    ("offline tokens/s", lambda f: _number(f["offline_tokens_per_s"])),
    ("online request p50 / p90 / p99, ms",
     lambda f: " / ".join(_number(f[f"online_{p}_ms"]) for p in ("p50", "p90", "p99"))),
    ("first token p50 / p90 / p99, ms",
     lambda f: " / ".join(_number(f[f"ttft_{p}_ms"]) for p in ("p50", "p90", "p99"))),
    ("deadlines met", lambda f: _percent(f["deadline_attainment"])),
    ("device busy, wall", lambda f: ", ".join(_percent(u) for u in f["device_utilisation"] or [None])),
    ("device busy, thread CPU", lambda f: ", ".join(_percent(u) for u in f["device_cpu_utilisation"] or [None])),
    ("operators executed", lambda f: _number(f["ops_executed"])),
    ("operators that escaped to eager", lambda f: _number(f["ops_bypassed"])),
    ("transfers", lambda f: _number(f["transfers"])),
    ("recalls, deferrals", lambda f: f"{_number(f.get('recalls'))}, {_number(f.get('deferrals'))}"),
    ("offline operators off their home", lambda f: "-" if f["offline_ops_off_home_pct"] is None
     else f"{f['offline_ops_off_home_pct']:.1f} %"),
    ("predicted against actual finish, median", lambda f: "-" if f["prediction_error_pct"] is None
     else f"{f['prediction_error_pct']:.1f} %"),
    ("online requests, seconds", lambda f: f"{f['online_requests']}, {f['seconds']:.1f}"),
]


def table(policies):
    """policies: name -> figures, in the order of the columns."""
    lines = [["", *policies], *([title, *(cell(f) for f in policies.values())] for title, cell in ROWS)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["  ".join(cell.ljust(widths[0]) if i == 0 else cell.rjust(widths[i]) for i, cell in enumerate(line))
            for line in lines]
    return "\n".join([text[0], "-" * len(text[0]), *text[1:]])


def comparison(policies):
    """What `slice` is for, in two lines; empty when a policy is missing."""
    if not {"slice", "fifo"} <= set(policies):
        return []
    sliced, fifo = policies["slice"], policies["fifo"]
    lines = [f"online p90 under slice: {sliced['online_p90_ms'] / fifo['online_p90_ms']:.2f} x fifo's"]
    if fifo["offline_tokens_per_s"]:
        share = sliced["offline_tokens_per_s"] / fifo["offline_tokens_per_s"]
        lines.append(f"offline tokens/s under slice: {share:.2f} x fifo's")
    return lines


def write(path, report):
    path.write_text(json.dumps(report, indent=1) + "\n")
