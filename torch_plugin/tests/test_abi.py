"""ctypes declarations against the header: sizes, offsets, constants, functions."""

import ctypes
import pathlib
import re
import shutil
import subprocess

import pytest

from slicescheduler import _abi, errors

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include" / "slice" / "slice.h"
STRUCTS = {
    "slice_session_options_t": _abi.SessionOptions,
    "slice_session_limits_t": _abi.SessionLimits,
    "slice_tensor_spec_t": _abi.TensorSpec,
    "slice_sequence_options_t": _abi.SequenceOptions,
    "slice_slot_t": _abi.Slot,
    "slice_submit_args_t": _abi.SubmitArgs,
    "slice_completion_t": _abi.Completion,
}


def constants():
    """{C name: value in _abi} of all numeric constants."""
    names = [n for n in vars(_abi) if re.match(r"(ERR_|CLASS_|TENSOR_|DIMS_|DTYPE_|OK$)", n)]
    found = {f"SLICE_{name}": getattr(_abi, name) for name in names}
    return {**found, "SLICE_ABI_MAJOR": _abi.ABI_MAJOR, "SLICE_ABI_MINOR": _abi.ABI_MINOR}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_Happy_layouts_and_constants_match_the_header(tmp_path):
    lines = [f"_Static_assert({name} == {value}, \"{name}\");" for name, value in constants().items()]
    for c_name, struct in STRUCTS.items():
        lines.append(f"_Static_assert(sizeof({c_name}) == {ctypes.sizeof(struct)}, \"sizeof {c_name}\");")
        for field, *_ in struct._fields_:
            offset = getattr(struct, field).offset
            lines.append(f"_Static_assert(offsetof({c_name}, {field}) == {offset}, \"{c_name}.{field}\");")
    source = tmp_path / "layout.c"
    source.write_text(f'#include "{HEADER}"\n' + "\n".join(lines) + "\n")
    result = subprocess.run(["cc", "-std=c11", "-fsyntax-only", source], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_Happy_every_status_and_function_of_the_header_is_declared():
    text = HEADER.read_text()
    statuses = dict(re.findall(r"\b(SLICE_ERR_\w+)\s*=\s*(\d+)", text))
    assert {name: str(value) for name, value in constants().items() if "_ERR_" in name} == statuses
    declared = re.findall(r"SLICE_API [^;(]*?\b(slice_\w+)\(([^;]*?)\);", text, re.S)
    assert {name for name, _ in declared} == set(_abi.SIGNATURES)
    for name, parameters in declared:
        count = 0 if parameters.strip() == "void" else parameters.count(",") + 1
        assert len(_abi.SIGNATURES[name][1]) == count, name


def test_Happy_every_status_has_an_exception_with_its_number():
    from fake_abi import FakeSlice

    library = _abi.Library(FakeSlice())
    for status in range(1, 21):
        error = library.error(status, "text")
        assert isinstance(error, errors.SliceError) and error.status == status
    assert library.error(_abi.ERR_WOULD_BLOCK, "").retryable and not library.error(_abi.ERR_GRAPH, "").retryable
