"""timeline.png from timeline.json: devices as rows, online and offline work in two colours, one panel per policy."""

import json

COLOURS = {"online": "#d1495b", "offline": "#30638e"}
MARK_PREFIX = "phase "


def read(path):
    """(device names, {device index: [(start s, duration s, class)]}, {policy: phase start s}) of a Chrome trace.

    Times are seconds since the recording began."""
    with open(path, encoding="utf-8") as file:
        trace = json.load(file)
    devices_pid = next(
        (e["pid"] for e in trace["traceEvents"]
         if e["ph"] == "M" and e["name"] == "process_name" and e["args"]["name"] == "devices"), None,
    )
    names, spans, phases = {}, {}, {}
    for event in trace["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == devices_pid:
            names[event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X" and event["pid"] == devices_pid and event.get("cat") in COLOURS:
            spans.setdefault(event["tid"], []).append((event["ts"] / 1e6, event["dur"] / 1e6, event["cat"]))
        elif event["ph"] == "i" and event["args"].get("kind") == "mark":
            label = event["args"].get("text", "")
            if label.startswith(MARK_PREFIX):
                phases[label[len(MARK_PREFIX):]] = event["ts"] / 1e6
    return [names[tid] for tid in sorted(names)], spans, phases


def liveliest(arrivals, length, seconds):
    """Where in a phase to look: the start of the window of `length` in which online work comes and goes most.

    arrivals: seconds of the requests, one list per tenant; the quietest tenant of a window counts."""
    def score(times, start):
        inside = [t for t in times if start <= t < start + length]
        gaps = sum(min(b - a, 1.0) for a, b in zip(inside, inside[1:]) if b - a >= 0.4)
        return min(len(inside), 6) + 3 * gaps

    starts = [i * 0.25 for i in range(int(max(0.0, seconds - length) / 0.25) + 1)]
    return max(starts, key=lambda start: min(score(sorted(times), start) for times in arrivals))


def draw(names, spans, phases, policies, window, path):
    """policies: [(name, title)] in the order of the panels; window: (offset s in the phase, length s)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    offset, length = window
    figure, axes = pyplot.subplots(
        len(policies), 1, figsize=(12, 0.7 + 1.45 * len(policies)), sharex=True, squeeze=False, layout="constrained",
    )
    for axis, (policy, title) in zip(axes[:, 0], policies):
        begin = phases.get(policy, 0.0) + offset
        for row, tid in enumerate(sorted(spans)):
            for kind, colour in COLOURS.items():
                bars = [
                    (start - begin, duration) for start, duration, cat in spans[tid]
                    if cat == kind and begin - duration < start < begin + length
                ]
                axis.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
        axis.set_yticks(range(len(names)), names)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_xlim(0, length)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_facecolor("#f4f4f4")
        for side in ("top", "right", "left"):
            axis.spines[side].set_visible(False)
    axes[-1, 0].set_xlabel(f"seconds (the same {length:g} s of the request list in every panel); grey: device idle")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in COLOURS.items()], loc="outside upper right",
        ncols=2, frameon=False, fontsize=9,
    )
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
