"""Writes the golden templates under tests/golden: the contract between plugin and executor.

  python torch_plugin/tests/make_golden.py            compares, prints the first difference, exits 1 on any
  SLICE_UPDATE_GOLDENS=1 python torch_plugin/tests/make_golden.py    rewrites them

Weights are random: a template does not contain them.
"""

import os
import pathlib
import sys

os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] = "1"  # read by transformers at import

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN_DIR = ROOT / "tests" / "golden"
sys.path[:0] = [str(ROOT / "torch_plugin"), str(pathlib.Path(__file__).resolve().parent)]

import programs  # noqa: E402
from google.protobuf import text_format  # noqa: E402


def golden_text(template):
    """Text form of a template, without what differs between torch builds."""
    normal = type(template)()
    normal.CopyFrom(template)
    normal.metadata.framework = normal.metadata.framework.split("+")[0]
    return text_format.MessageToString(normal)


def golden_templates():
    """{file name: template} of every golden."""
    prefill, decode = programs.capture_llama_templates()
    return {
        "llama_prefill.textproto": prefill,
        "llama_decode.textproto": decode,
        "mlp.textproto": programs.capture_mlp_template(),
    }


def update_or_compare():
    """Names of goldens that differ from a fresh capture; with SLICE_UPDATE_GOLDENS=1 rewrites them instead."""
    different = []
    for name, template in golden_templates().items():
        path, text = GOLDEN_DIR / name, golden_text(template)
        if os.environ.get("SLICE_UPDATE_GOLDENS") == "1":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            different.append(name)
    return different


if __name__ == "__main__":
    names = update_or_compare()
    if names:
        sys.exit(f"out of date: {', '.join(names)}; rewrite with SLICE_UPDATE_GOLDENS=1")
