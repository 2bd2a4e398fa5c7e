"""The demo's own parts: what is asked, how answers are checked, how figures come about. No daemon needed."""

import pathlib
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools" / "demo"), str(ROOT / "torch_plugin" / "examples")]

TRACES = ROOT.parent / "shared" / "traces"  # published ones; not part of the project

import arrivals  # noqa: E402
import demo  # noqa: E402
import report  # noqa: E402
import timeline_plot  # noqa: E402

# ---- requests ----------------------------------------------------------------------------------


def test_Happy_bursts_are_fixed_by_the_seed_and_come_in_bursts():
    load = arrivals.bursty(7, 64, 24)

    assert load == arrivals.bursty(7, 64, 24) != arrivals.bursty(8, 64, 24)
    times = [at for at, _ in load.requests]
    gaps = [b - a for a, b in zip(times, times[1:])]
    assert times == sorted(times) and len(times) == 64
    assert max(gaps) > 0.5 > sorted(gaps)[len(gaps) // 2], "long silences between many short gaps"


def test_Happy_stretching_keeps_proportions_and_order():
    loads = [arrivals.bursty(seed, 30, 5) for seed in (1, 2)]

    stretched = arrivals.stretch(loads, 20.0)

    assert max(load.requests[-1][0] for load in stretched) == pytest.approx(20.0)
    factor = stretched[0].requests[3][0] / loads[0].requests[3][0]
    assert stretched[1].requests[7][0] == pytest.approx(loads[1].requests[7][0] * factor)


def test_Happy_a_trace_is_shared_out_and_clipped_to_the_model(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival_ms,input_tokens,output_tokens\n" + "".join(f"{i * 100},{i * 300},{i * 9}\n" for i in range(40)))

    loads = [arrivals.from_trace(arrivals.read_trace(file), i, 2, 20, 6) for i in range(2)]

    assert [at for at, _ in loads[1].requests[:3]] == pytest.approx([0.1, 0.3, 0.5])
    for load in loads:
        assert len(load.shapes) <= 6
        for shape in load.shapes:
            assert arrivals.INPUT_TOKENS[0] <= shape.input_tokens <= arrivals.INPUT_TOKENS[1]
            assert arrivals.OUTPUT_TOKENS[0] <= shape.output_tokens <= arrivals.OUTPUT_TOKENS[1]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("time,in,out\n1,2,3\n", "line 1: no column arrival_ms, input_tokens, output_tokens"),
        ("arrival_ms,input_tokens\n1,2\n", "line 1: no column output_tokens"),
        ("", "first line must be"),
        ("arrival_ms,input_tokens,output_tokens\n", "no requests"),
        ("arrival_ms,input_tokens,output_tokens\n1,x,3\n", "line 2"),
        ("arrival_ms,input_tokens,output_tokens\n5,1,1\n4,1,1\n", "line 3: arrives at 4 ms.*sort"),
        ("arrival_ms,input_tokens,output_tokens\n5,-1,1\n", "line 2: a negative"),
        ("arrival_ms,input_tokens,output_tokens\n-5,1,1\n", "line 2: a negative"),
        ("arrival_ms,input_tokens,output_tokens\n5,1.5,1\n", "line 2: a whole number"),
        ('arrival_ms,input_tokens,output_tokens\n5,"1,1\n', "not a CSV file"),
        ("arrival_ms,input_tokens,output_tokens\n5\n", "line 2"),
    ],
)
def test_Edge_a_malformed_trace_is_refused_with_the_place(tmp_path, text, complaint):
    file = tmp_path / "trace.csv"
    file.write_text(text)

    with pytest.raises(ValueError, match=complaint):
        arrivals.read_trace(file)


def test_Edge_a_trace_may_have_a_byte_order_mark_and_more_columns(tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("\ufeffarrival_ms,user, output_tokens,input_tokens\n5,a,7,6\n", encoding="utf-8")

    assert arrivals.read_trace(file) == [(0.005, 6, 7)]


def test_Edge_a_trace_with_too_few_requests_says_how_many_would_do(tmp_path):
    with pytest.raises(ValueError, match=r"has 9 requests, 124 are needed.*--requests 4 "):
        arrivals.from_trace([(float(i), 400, 160) for i in range(9)], 0, 2, 62, 6)


def test_Happy_the_note_counts_the_clipped_requests():
    note = arrivals.trace_note([(0.0, 800, 200), (1.0, 100_000, 200), (2.0, 800, 0)])

    assert "2 of 3 requests clipped" in note


@pytest.mark.parametrize("name", ["online_a.csv", "online_b.csv"])
def test_Happy_published_traces_give_the_demo_enough(name):
    file = TRACES / name
    if not file.exists():
        pytest.skip(f"{name} is not beside this checkout")

    rows = arrivals.read_trace(file)
    loads = arrivals.stretch([arrivals.from_trace(rows, i, 2, 62, 24) for i in range(2)], 14.0)

    for load in loads:
        times = [at for at, _ in load.requests]
        assert len(times) == 62 and times == sorted(times) and 0 <= times[0] <= times[-1] <= 14.0 + 1e-9
        assert 1 < len(load.shapes) <= 24


# ---- answers -----------------------------------------------------------------------------------


@pytest.fixture
def tenant():
    from online_tenant import OnlineTenant

    tenant = OnlineTenant("test", None, eager=True)
    tenant.prepare([[40, 6], [24, 4]], seed=3)
    tenant.warm_up(rounds=2)
    return tenant


def run_two(tenant):
    return tenant.run(start_ns=0, requests=[[0.0, 0], [0.0, 1]], deadline_factor=2.5)["results"]


def test_Happy_right_answers_pass_the_check(tenant):
    results = run_two(tenant)

    checked = tenant.check()

    assert [r["output_tokens"] for r in results] == [6, 4]
    assert (checked["checked"], checked["wrong"]) == (2, 0)


def test_Malicious_one_corrupted_kv_write_fails_the_demo(tenant):
    forward, calls = tenant.server.forward, []

    def corrupting(**arguments):
        out = forward(**arguments)
        calls.append(1)
        if len(calls) == 2:  # first step after the first prompt: one element of one layer's keys
            tenant.server.cache.layers[2].keys[0, 1, 40, 5] += 0.01
        return out

    tenant.server.forward = corrupting
    run_two(tenant)

    checked = tenant.check()
    assert (checked["checked"], checked["wrong"]) == (2, 1)
    result = {
        "answers_checked": checked["checked"], "answers_wrong": checked["wrong"], "recompiles_after_warmup": 0,
        "policies": {"slice": {"ops_bypassed": 0}},
    }
    lines, code = demo.verdict(result, checked["examples"])
    assert code == 1 and "WRONG" in "\n".join(lines)


@pytest.mark.parametrize("change", [{"recompiles_after_warmup": 1}, {"policies": {"slice": {"ops_bypassed": 2}}}])
def test_Edge_recompiles_and_bypassed_operators_fail_the_demo(change):
    result = {
        "answers_checked": 5, "answers_wrong": 0, "recompiles_after_warmup": 0,
        "policies": {"slice": {"ops_bypassed": 0}}, **change,
    }

    assert demo.verdict(result, [])[1] == 1


# ---- figures -----------------------------------------------------------------------------------


def make_status(ops, transfers, offline, off_home):
    return {"counters": dict(
        ops_executed=ops, transfers=transfers, offline_ops=offline, offline_ops_off_home=off_home, recalls=0, deferrals=0,
        rounds=ops,
    )}


def make_phase(**fields):
    request = {
        "arrival_ns": 0, "first_ns": 10_000_000, "finish_ns": 40_000_000, "deadline_ns": 50_000_000,
        "input_tokens": 30, "output_tokens": 20, "runs": [(0, 10, 11), (10, 20, 0)],
    }
    late = {**request, "finish_ns": 60_000_000, "runs": []}
    before = report.counters(make_status(10, 1, 4, 0), [{"busy_ns": 0, "cpu_ns": 0}] * 2)
    after = report.counters(
        make_status(110, 6, 44, 10), [{"busy_ns": 5 * 10**8, "cpu_ns": 4 * 10**8}, {"busy_ns": 10**9, "cpu_ns": 9 * 10**8}]
    )
    return report.Phase("slice", 0, 2 * 10**9, [request, late], **{"before": before, "after": after, **fields})


def test_Happy_figures_follow_from_results_and_counters():
    found = report.figures(make_phase(), [(10**9, 128), (3 * 10**9, 128)], bypassed=0)

    assert found["online_tokens_per_s"] == 50
    assert found["offline_tokens_per_s"] == 64, "only what was processed inside the phase"
    assert found["online_p50_ms"] == 50
    assert found["deadline_attainment"] == 0.5
    assert found["device_utilisation"] == [0.25, 0.5]
    assert (found["ops_executed"], found["transfers"], found["offline_ops_off_home_pct"]) == (100, 5, 25)
    assert found["prediction_error_pct"] == pytest.approx(10), "runs without a prediction do not count"


def test_Edge_without_a_daemon_the_table_has_dashes():
    policies = {"eager": report.figures(make_phase(before=None), [], bypassed=0)}

    text = report.table(policies)

    assert "eager" in text and "-" in text
    assert report.comparison(policies) == []


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2.5), (1, 4)])
def test_Happy_percentile_is_linear(share, value):
    assert report.percentile([4, 1, 3, 2], share) == value
    assert report.percentile([], share) is None


def test_Happy_timeline_picture_from_a_recording(tmp_path):
    import json

    events = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "devices"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "cpu0"}},
        {"ph": "i", "name": "mark", "pid": 3, "tid": 0, "ts": 1e6, "s": "g", "args": {"kind": "mark", "text": "phase slice"}},
        {"ph": "X", "name": "layer", "pid": 1, "tid": 0, "ts": 1.5e6, "dur": 2e5, "cat": "online", "args": {"kind": "op"}},
        {"ph": "X", "name": "copy", "pid": 2, "tid": 0, "ts": 1.5e6, "dur": 2e5, "cat": "offline", "args": {"kind": "transfer"}},
    ]
    file = tmp_path / "timeline.json"
    file.write_text(json.dumps({"traceEvents": events}))

    names, spans, phases = timeline_plot.read(file)
    timeline_plot.draw(names, spans, phases, [("slice", "slice")], (0.0, 2.0), tmp_path / "timeline.png")

    assert names == ["cpu0"] and spans == {0: [(1.5, 0.2, "online")]} and phases == {"slice": 1.0}
    assert (tmp_path / "timeline.png").stat().st_size > 5000
