"""What the online tenants are asked, and when: a bursty generator, or a trace file scaled to the demo.

Everything here is fixed by the seed, so that every policy sees the same requests. Times are seconds from a phase's
start; the list is stretched as a whole to the load that the machine can bear (see `stretch`).
"""

import csv
import dataclasses
import random

INPUT_TOKENS = (24, 96)    # what the demo's model is asked: smallest, largest
OUTPUT_TOKENS = (16, 40)
TRACE_INPUT_DIVISOR = 16   # traces of large models: thousands of tokens; ours has a cache of 640
TRACE_OUTPUT_DIVISOR = 8


@dataclasses.dataclass(frozen=True)
class Shape:
    input_tokens: int
    output_tokens: int


@dataclasses.dataclass(frozen=True)
class Load:
    """Of one tenant. `requests`: (seconds from start, index into shapes), in time order."""

    shapes: list
    requests: list


def _clip(value, bounds):
    return max(bounds[0], min(bounds[1], value))


def bursty(seed, count, shape_count):
    """On/off bursts: arrivals at one rate (gamma gaps, less random than Poisson) while on, silence while off."""
    rng = random.Random(seed)
    shapes = [Shape(rng.randint(*INPUT_TOKENS), rng.randint(*OUTPUT_TOKENS)) for _ in range(shape_count)]
    requests, now = [], rng.uniform(0.0, 1.0)
    while len(requests) < count:
        burst_end = now + _clip(rng.expovariate(1 / 1.5), (0.5, 4.0))
        while now < burst_end and len(requests) < count:
            requests.append((now, len(requests) % shape_count))
            now += rng.gammavariate(3, 0.2 / 3)
        now = burst_end + _clip(rng.expovariate(1 / 1.0), (0.5, 4.0))
    return Load(shapes, requests)


def read_trace(path):
    """[(seconds, input tokens, output tokens)] of a CSV with the header arrival_ms,input_tokens,output_tokens.

    Errors: ValueError that names file, line and what is expected.
    """
    rows = []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        wanted = ["arrival_ms", "input_tokens", "output_tokens"]
        if reader.fieldnames is None or [name.strip() for name in reader.fieldnames] != wanted:
            raise ValueError(f"{path}: the first line must be {','.join(wanted)}, not {reader.fieldnames}")
        for row in reader:
            try:
                values = [int(row[name]) for name in wanted]
            except (TypeError, ValueError):
                raise ValueError(f"{path}, line {reader.line_num}: three whole numbers expected, not {row}") from None
            if min(values) < 0 or (rows and values[0] / 1e3 < rows[-1][0]):
                raise ValueError(f"{path}, line {reader.line_num}: negative, or earlier than the line before")
            rows.append((values[0] / 1e3, values[1], values[2]))
    if not rows:
        raise ValueError(f"{path}: no requests in it")
    return rows


def from_trace(rows, tenant, tenant_count, count, shape_count):
    """Every `tenant_count`-th row for this tenant, `count` of them; sizes divided and clipped to the demo's model."""
    mine = rows[tenant::tenant_count][:count]
    if len(mine) < count:
        raise ValueError(f"the trace has {len(rows)} requests, {count * tenant_count} are needed")
    sizes = [
        Shape(_clip(given // TRACE_INPUT_DIVISOR, INPUT_TOKENS), _clip(taken // TRACE_OUTPUT_DIVISOR, OUTPUT_TOKENS))
        for _, given, taken in mine
    ]
    # Expected answers are computed once per shape: a few shapes, chosen evenly, stand for all.
    ordered = sorted(set(sizes), key=lambda s: (s.output_tokens, s.input_tokens))
    step = max(1, len(ordered) / shape_count)
    shapes = [ordered[int(i * step)] for i in range(min(shape_count, len(ordered)))]
    nearest = [
        min(range(len(shapes)), key=lambda i: abs(shapes[i].input_tokens - s.input_tokens) / 16
            + abs(shapes[i].output_tokens - s.output_tokens))
        for s in sizes
    ]
    return Load(shapes, [(row[0] - rows[0][0], shape) for row, shape in zip(mine, nearest)])


def stretch(loads, seconds):
    """The loads with all times scaled by one factor, so that the last request comes at `seconds`."""
    last = max(load.requests[-1][0] for load in loads)
    factor = seconds / last if last > 0 else 1.0
    return [Load(load.shapes, [(at * factor, shape) for at, shape in load.requests]) for load in loads]
