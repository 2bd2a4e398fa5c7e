#!/usr/bin/env python3
"""The core's figures (simulator, Global Mapping Graph, estimators) beside a stored baseline: out/bench/core.json.

A time is compared after it is divided by what the naive simulator takes per operator in the same run, so that a
regression shows on any machine; ratios, bytes and percentages are compared as they are.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

from figures import BenchError, exit_code, print_table, run_programs, write

ROOT = pathlib.Path(__file__).resolve().parents[2]
BASELINE = ROOT / "tests/bench/baseline.json"
PROGRAMS = ("sim_bench", "gmg_bench", "estimator_bench")
GOALS = {
    "sim_ops_per_ms_1k": "goal 40,000 where the naive one does 10,000-18,000",
    "sim_ops_per_ms_10k": "goal 40,000",
    "sim_ops_per_ms_100k": "goal 25,000",
    "naive_ops_per_ms_1k": "",
    "naive_ops_per_ms_10k": "",
    "naive_ops_per_ms_100k": "",
    "sim_over_naive_ratio_1k": "at least 2.5",
    "sim_over_naive_ratio_10k": "at least 2.5",
    "sim_over_naive_ratio_100k": "at least 1.8",
    "sim_run_ops_per_ms_1k": "with the preparation",
    "sim_run_ops_per_ms_10k": "",
    "sim_run_ops_per_ms_100k": "",
    "run_over_naive_ratio_1k": "with the preparation",
    "run_over_naive_ratio_10k": "",
    "run_over_naive_ratio_100k": "",
    "sim_rollout_ops_per_ms_1k": "no op is placed",
    "rollout_over_naive_ratio_1k": "",
    "whatifs_per_ms_256": "goal 150",
    "whatifs_per_ms_1024": "goal 45",
    "whatif_over_clone_ratio_1024": "at least 4",
    "sim_cost_64_over_8_devices": "at most 2",
    "sim_bytes_per_op_100k": "at most 40",
    "gmg_bytes_per_live_op": "at most 160",
    "gmg_instantiate_us_34": "at most 3",
    "gmg_done_ns": "at most 100",
    "gmg_reader_slowdown_pct": "at most 3",
    "estimator_predict_ns": "at most 30",
    "estimator_update_ns": "at most 100",
    "gap_p10_coverage_pct": "8 to 12",
    "gap_p90_coverage_pct": "88 to 92",
}
ESTIMATOR_GOALS = {
    "op_mape_heldout_pct": "at most 1.6",
    "op_mape_linear_pct": "the plain linear fit",
    "op_mape_seen_pct": "at most op_cov_pct",
    "op_cov_pct": "noise of the samples",
    "transfer_mape_heldout_pct": "at most 2",
}
# Beyond this against the baseline a figure is marked; noise of a shared machine stays below.
WORSE = 1.25
TIMES = {"us": 1.0, "ns": 1.0, "ns/op": 1.0, "ops/ms": -1.0, "what-ifs/ms": -1.0}  # sign: more is worse, or less is


def in_naive_operators(figure, naive):
    """A time or speed in units of the naive simulator's time per operator; other figures unchanged."""
    sign = TIMES.get(figure["unit"])
    if sign is None:
        return figure["value"]
    return figure["value"] * naive if sign > 0 else figure["value"] / naive


def compare(figures, baseline):
    """Notes by name for figures that the baseline has: how many times worse (above 1) they are."""
    notes, now, then = {}, {f["name"]: f for f in figures}, {f["name"]: f for f in baseline}
    reference = "naive_ops_per_ms_10k"
    if reference not in now or reference not in then:
        return notes
    for name in now.keys() & then.keys():
        if name.startswith(("naive_", "gap_")) or then[name]["value"] <= 0:
            continue
        ratio = in_naive_operators(now[name], now[reference]["value"]) / in_naive_operators(then[name], then[reference]["value"])
        more_is_better = TIMES.get(now[name]["unit"], 1.0) < 0 or "_ratio_" in name
        notes[name] = 1 / ratio if more_is_better and ratio > 0 else ratio
    return notes


def estimators(build, profiles, out):
    """Runs slice-replay on the recorded profiles of a folder; None when there are none."""
    files = sorted(profiles.glob("*.csv")) if profiles else []
    if not files:
        print("  estimators on recorded profiles: skipped, no folder with profiles (SLICE_PROFILES=FOLDER)", file=sys.stderr)
        return None
    print("  slice-replay estimators ...", file=sys.stderr, flush=True)
    command = [str(build / "bin/slice-replay"), "estimators", "--json", str(out)]
    for file in files:
        command += ["--profile", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise BenchError(f"slice-replay ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
    return json.loads(out.read_text())["figures"]


def profile_folder():
    """SLICE_PROFILES, else a folder `profiles` in one beside the checkout."""
    named = os.environ.get("SLICE_PROFILES")
    return pathlib.Path(named) if named else next(iter(sorted(ROOT.parent.glob("*/profiles"))), None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/release")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "out/bench")
    parser.add_argument("--save-baseline", action="store_true", help=f"write {os.path.relpath(BASELINE, ROOT)}")
    arguments = parser.parse_args()
    path = arguments.out / "core.json"
    try:
        figures = run_programs(arguments.build, PROGRAMS)
        write(figures, path)
        learned = estimators(arguments.build, profile_folder(), arguments.out / "estimators.json")
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    worse = compare(figures, json.loads(BASELINE.read_text())["figures"]) if BASELINE.exists() else {}
    notes = dict(GOALS)
    for name, ratio in worse.items():
        if ratio > WORSE:
            notes[name] = f"{notes.get(name, '')}  <- {ratio:.2f} x worse than the baseline".strip()
    print_table(figures, notes, path)
    if learned is not None:
        print_table(learned, ESTIMATOR_GOALS, arguments.out / "estimators.json")
    if arguments.save_baseline:
        write(figures, BASELINE)
    return exit_code(figures, GOALS)


if __name__ == "__main__":
    sys.exit(main())
