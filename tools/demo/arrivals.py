"""What the online tenants are asked, and when: a bursty generator, or a trace file scaled to the demo.

Everything here is fixed by the seed, so that every policy sees the same requests. Times are seconds from a phase's
start; the list is stretched as a whole to the load that the machine can bear (see `stretch`).
"""

import csv
import dataclasses
import random

INPUT_TOKENS = (24, 96)    # what the demo's model is asked: smallest, largest
OUTPUT_TOKENS = (16, 40)
TRACE_COLUMNS = ("arrival_ms", "input_tokens", "output_tokens")
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
    with open(path, newline="", encoding="utf-8-sig") as file:
        try:
            reader = csv.DictReader(file, strict=True)
            names = [name.strip() for name in reader.fieldnames or ()]
            missing = [name for name in TRACE_COLUMNS if name not in names]
            if missing:
                raise ValueError(
                    f"{path}, line 1: no column {', '.join(missing)}; the first line must be {','.join(TRACE_COLUMNS)}"
                )
            reader.fieldnames = names
            for row in reader:
                rows.append(_trace_row(row, rows[-1][0] if rows else 0.0, f"{path}, line {reader.line_num}"))
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: not a CSV file in UTF-8: {error}") from None
    if not rows:
        raise ValueError(f"{path}: no requests in it, only the first line")
    return rows


def _trace_row(row, earliest, where):
    try:
        arrival_ms, input_tokens, output_tokens = (int(row[name]) for name in TRACE_COLUMNS)
    except (TypeError, ValueError):
        given = ",".join("" if value is None else str(value) for value in row.values())
        raise ValueError(f"{where}: a whole number expected in each of {','.join(TRACE_COLUMNS)}, not {given}") from None
    if arrival_ms < 0 or input_tokens < 0 or output_tokens < 0:
        raise ValueError(f"{where}: a negative number: {arrival_ms},{input_tokens},{output_tokens}")
    if arrival_ms / 1e3 < earliest:
        raise ValueError(
            f"{where}: arrives at {arrival_ms} ms, before the line above it ({earliest * 1e3:.0f} ms): sort by arrival_ms"
        )
    return arrival_ms / 1e3, input_tokens, output_tokens


def scaled(input_tokens, output_tokens):
    """(the Shape that stands for a trace's request in the demo, whether a size had to be clipped to the model)."""
    wanted = Shape(input_tokens // TRACE_INPUT_DIVISOR, output_tokens // TRACE_OUTPUT_DIVISOR)
    shape = Shape(_clip(wanted.input_tokens, INPUT_TOKENS), _clip(wanted.output_tokens, OUTPUT_TOKENS))
    return shape, shape != wanted


def trace_note(rows):
    """One line for people: what was done to the sizes of these requests."""
    clipped = sum(scaled(given, taken)[1] for _, given, taken in rows)
    return (
        f"trace: input tokens / {TRACE_INPUT_DIVISOR}, output tokens / {TRACE_OUTPUT_DIVISOR}; {clipped} of {len(rows)} "
        f"requests clipped to what the demo's model is asked: {INPUT_TOKENS[0]}..{INPUT_TOKENS[1]} tokens in, "
        f"{OUTPUT_TOKENS[0]}..{OUTPUT_TOKENS[1]} out; a few sizes stand for all"
    )


def from_trace(rows, tenant, tenant_count, count, shape_count):
    """Every `tenant_count`-th row for this tenant, `count` of them; sizes divided and clipped to the demo's model.

    Errors: ValueError when there are fewer.
    """
    mine = rows[tenant::tenant_count][:count]
    if len(mine) < count:
        raise ValueError(
            f"the trace has {len(rows)} requests, {count * tenant_count} are needed ({count} for each of {tenant_count} "
            f"tenants): a longer trace, or --requests {len(rows) // tenant_count} (fewer say little about percentiles)"
        )
    sizes = [scaled(given, taken)[0] for _, given, taken in mine]
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
