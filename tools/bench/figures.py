"""Figures as every bench gives them: {"figures": [{"name", "value", "unit"}]}; read from programs, printed, written."""

import json
import os
import subprocess
import sys


class BenchError(Exception):
    """What failed and where to look."""


def run_programs(build, names, timeout_s=900):
    """Figures that the programs `build`/bin/`names` print. Raises BenchError with the program's last words."""
    found = []
    for name in names:
        program = build / "bin" / name
        print(f"  {name} ...", file=sys.stderr, flush=True)
        try:
            done = subprocess.run([str(program)], capture_output=True, text=True, timeout=timeout_s)
        except OSError as error:
            raise BenchError(f"cannot start {program}: {error.strerror}; build the preset first") from error
        except subprocess.TimeoutExpired as error:
            raise BenchError(f"{program} did not end within {timeout_s} s") from error
        if done.returncode != 0:
            raise BenchError(f"{program} ended with code {done.returncode}: {done.stderr.strip()[-500:]}")
        try:
            found += json.loads(done.stdout)["figures"]
        except (ValueError, KeyError) as error:
            raise BenchError(f"{program} did not print figures: {error}") from error
    return found


def write(figures, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"figures": figures}, indent=1) + "\n")


def print_table(figures, notes, path):
    """One line a figure; those with a note (goal, comparison) first."""
    for figure in sorted(figures, key=lambda figure: figure["name"] not in notes):
        value = f"{figure['value']:>14,.3f}" if abs(figure["value"]) < 1000 else f"{figure['value']:>14,.0f}"
        print(f"{figure['name']:<36} {value} {figure['unit']:<8}{notes.get(figure['name'], '')}".rstrip())
    print(f"file: {os.path.relpath(path)}")


def exit_code(figures, promised):
    """0 when each promised name was measured; else 1, after a line that names the others."""
    absent = sorted(set(promised) - {figure["name"] for figure in figures})
    if absent:
        print(f"bench: not measured: {', '.join(absent)}", file=sys.stderr)
    return 1 if absent else 0
