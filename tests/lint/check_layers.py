#!/usr/bin/env python3
"""Fails when a file includes something its layer must not use, and warns about files that are too long.

    check_layers.py [ROOT]          checks the tree
    check_layers.py --self-test     checks the checker

The arrows are those of docs/architecture.md. CMake's PRIVATE links enforce them for libraries; this also sees headers,
which need no link.
"""

import pathlib
import re
import sys

LINES_MAX = 600
SUFFIXES = {".h", ".cc", ".c", ".cu", ".cuh"}

# Folder -> folders of ours whose headers it may include. The longest matching folder of a file counts.
ALLOWED = {
    "include": {"include"},
    "common": {"common", "include"},
    "daemon/graph": {"common", "proto"},
    "daemon/gmg": {"common", "daemon/graph"},
    "daemon/estimate": {"common"},
    "daemon/sim": {"common", "daemon/graph", "daemon/gmg", "daemon/estimate"},
    "daemon/sched": {"common", "daemon/graph", "daemon/gmg", "daemon/estimate", "daemon/sim"},
    "daemon/transfer": {"common", "daemon/graph", "daemon/gmg"},
    "daemon/engine": {
        "common", "daemon/graph", "daemon/gmg", "daemon/estimate", "daemon/sim", "daemon/sched", "daemon/transfer",
    },
    "daemon/server": {"common", "include", "proto", "daemon/graph", "daemon/gmg", "daemon/estimate", "daemon/engine"},
    "daemon/executor": {"common", "include", "proto", "daemon/graph"},
    "libclient": {"common", "include", "proto"},
    "tools/replay": {"common", "daemon/estimate"},
    "tools/slicectl": {"common", "include", "proto", "daemon/gmg", "libclient"},
}
UNCHECKED = ("tests", "torch_plugin/examples", "build")

# No clock, thread, IO of their own: time and transport are injected (common/clock.h and common/fd.h would undo that).
PURE = {"daemon/graph", "daemon/estimate", "daemon/sim", "daemon/sched", "daemon/transfer", "daemon/engine"}
PURE_FORBIDDEN = re.compile(
    r"(thread|mutex|shared_mutex|condition_variable|future|chrono|random|iostream|fstream|filesystem|ctime|time\.h|"
    r"unistd\.h|fcntl\.h|poll\.h|pthread\.h|sys/.*|linux/.*|common/(clock|fd|log)\.h)$"
)
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/|(.*/)?(cuda|nccl)")
TORCH_FOLDERS = {"daemon/executor"}
PROTOBUF = re.compile(r"google/protobuf/|slice/proto/")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


def layer_of(path):
    """Longest folder of ALLOWED that holds this include or file path, or None."""
    parts = path.split("/")
    for count in range(len(parts) - 1, 0, -1):
        folder = "/".join(parts[:count])
        if folder in ALLOWED:
            return folder
    return None


def violation(path, name):
    """Why `path` must not include `name`; None if it may."""
    layer = layer_of(path)
    if TORCH.match(name):
        return None if layer in TORCH_FOLDERS else "only daemon/executor may use torch or CUDA headers"
    if PROTOBUF.match(name):
        return None if "proto" in ALLOWED[layer] else f"{layer} must not know protobuf messages"
    if layer in PURE and PURE_FORBIDDEN.match(name):
        return f"{layer} is pure: no clock, thread or IO"
    target = "include" if name.startswith("slice/") else layer_of(name)
    if target is None or target == layer or target in ALLOWED[layer]:
        return None
    return f"{layer} must not use {target}"


def check(root):
    errors, warnings, checked = [], [], 0
    for file in sorted(root.rglob("*")):
        path = file.relative_to(root).as_posix()
        if file.suffix not in SUFFIXES | {".py"} or path.startswith(("build", ".", "out/")) or "_proto/" in path:
            continue
        text = file.read_text(encoding="utf-8", errors="replace").splitlines()
        if len(text) > LINES_MAX:
            warnings.append(f"{path}: {len(text)} lines, more than {LINES_MAX}: a place to look for two things in one")
        if file.suffix == ".py" or path.startswith(UNCHECKED):
            continue
        checked += 1
        if layer_of(path) is None:
            errors.append(f"{path}: in no known layer: add its folder to ALLOWED in tests/lint/check_layers.py")
            continue
        for number, line in enumerate(text, 1):
            match = INCLUDE.match(line)
            why = match and violation(path, match.group(2))
            if why:
                errors.append(f"{path}:{number}: includes {match.group(2)}: {why}")
    return errors, warnings, checked


def self_test():
    bad = [
        ("daemon/engine/engine.cc", "common/clock.h"),
        ("daemon/engine/engine.cc", "sys/socket.h"),
        ("daemon/engine/engine.cc", "daemon/server/session.h"),
        ("daemon/sim/simulator.cc", "daemon/engine/engine.h"),
        ("daemon/sim/simulator.cc", "thread"),
        ("daemon/sched/policy.cc", "slice/proto/control.pb.h"),
        ("daemon/server/main.cc", "torch/torch.h"),
        ("daemon/server/main.cc", "ATen/ATen.h"),
        ("daemon/gmg/segment.cc", "cuda_runtime_api.h"),
        ("daemon/executor/main.cc", "daemon/engine/engine.h"),
        ("libclient/session.cc", "daemon/gmg/segment.h"),
        ("tools/slicectl/main.cc", "daemon/engine/engine.h"),
        ("common/fd.h", "daemon/gmg/segment.h"),
    ]
    good = [
        ("daemon/engine/engine.cc", "daemon/sched/policy.h"),
        ("daemon/engine/engine.cc", "vector"),
        ("daemon/executor/cpu/backend.cc", "ATen/core/dispatch/Dispatcher.h"),
        ("daemon/executor/main.cc", "daemon/graph/template.h"),
        ("daemon/server/main.cc", "slice/proto/control.pb.h"),
        ("daemon/graph/template.h", "slice/proto/template.pb.h"),
        ("libclient/session.cc", "slice/slice.h"),
        ("tools/slicectl/main.cc", "daemon/gmg/reader.h"),
    ]
    wrong = [f"{f} -> {i} must be refused" for f, i in bad if not violation(f, i)]
    wrong += [f"{f} -> {i} must be accepted: {violation(f, i)}" for f, i in good if violation(f, i)]
    for line in wrong:
        print("self-test:", line)
    return 1 if wrong else 0


def main(arguments):
    if "--self-test" in arguments:
        return self_test()
    root = pathlib.Path(arguments[0] if arguments else pathlib.Path(__file__).parents[2]).resolve()
    errors, warnings, checked = check(root)
    for line in warnings:
        print("warning:", line)
    for line in errors:
        print("error:", line)
    print(f"layers: {checked} files, {len(errors)} forbidden includes, {len(warnings)} long files")
    if checked == 0:
        print(f"error: no source under {root}")
    return 1 if errors or checked == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
