"""The backend's refusals, and the files that must not drift apart."""

import os
import pathlib
import shutil
import subprocess

import pytest
import torch

import make_golden
import programs
from slicescheduler import errors
from slicescheduler.operators import allowed_operators, operator_name
from slicescheduler.tensors import contiguous_strides

PLUGIN = pathlib.Path(__file__).resolve().parents[1]


def test_Happy_goldens_match_a_fresh_capture():
    assert make_golden.update_or_compare() == [], "rewrite with SLICE_UPDATE_GOLDENS=1 and check the executor"


def test_Happy_generated_module_matches_the_proto(tmp_path):
    protoc = shutil.which("protoc")
    if protoc is None:
        pytest.skip("protoc is not installed")
    version = subprocess.run([protoc, "--version"], capture_output=True, text=True, check=True).stdout
    if "3.21" not in version:
        pytest.skip(f"the checked-in module was made by protoc 3.21, not {version.strip()}")
    source = PLUGIN.parent / "include" / "slice" / "proto"
    subprocess.run([protoc, f"-I{source}", f"--python_out={tmp_path}", "template.proto"], check=True)
    ours = PLUGIN / "slicescheduler" / "_proto" / "template_pb2.py"
    assert ours.read_text() == (tmp_path / "template_pb2.py").read_text(), "see _proto/__init__.py"


def test_Happy_every_allowed_operator_exists_and_is_deterministic():
    for name in allowed_operators():
        namespace, rest = name.split("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        assert operator_name(operator) == name
        if "_scaled_dot_product" not in name:  # random only with dropout
            assert torch.Tag.nondeterministic_seeded not in operator.tags, name
        assert torch.Tag.data_dependent_output not in operator.tags, name


def test_Malicious_training_graph_is_refused_with_advice():
    recorder = programs.Recorder()
    compiled = torch.compile(torch.nn.Linear(4, 4), backend=recorder.backend, fullgraph=True)
    with pytest.raises(Exception) as caught:
        compiled(torch.randn(2, 4))
    error = caught.value
    while error is not None and not isinstance(error, errors.TrainingGraphError):
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
    assert isinstance(error, errors.TrainingGraphError) and "inference_mode" in str(error)


def test_Malicious_unknown_operators_are_all_named():
    def program(x):
        return torch.linalg.inv(x) + torch.bernoulli(x) + torch.linalg.det(x)

    recorder = programs.Recorder()
    compiled = torch.compile(program, backend=recorder.backend, fullgraph=True)
    with torch.inference_mode(), pytest.raises(Exception) as caught:
        compiled(torch.rand(3, 3))
    error = caught.value
    while error is not None and not isinstance(error, errors.UnsupportedOperatorError):
        error = error.__cause__ or error.__context__ or getattr(error, "inner_exception", None)
    assert isinstance(error, errors.UnsupportedOperatorError)
    assert {"aten::linalg_inv_ex", "aten::bernoulli", "aten::_linalg_det"} <= set(error.operators)
    assert all(name in str(error) for name in error.operators)


def test_Edge_error_classes_carry_status_and_retryability():
    assert errors.WouldBlock("full").retryable and not errors.StateLost("kv").retryable
    error = errors.OperatorFailed("mm failed", status=12)
    assert (error.status, error.retryable, str(error)) == (12, False, "mm failed")
    assert issubclass(errors.TrainingGraphError, errors.SliceError)


def test_Edge_contiguous_strides_match_torch():
    for sizes in ((2, 3, 4), (1,), (), (2, 0, 3)):
        assert contiguous_strides(sizes) == torch.empty(sizes).stride()


def test_Happy_mlp_golden_is_readable_by_itself():
    assert os.environ["TRANSFORMERS_SDPA_FORCE_GQA"] == "1"
    template = programs.capture_mlp_template()
    assert [template.operators[n.operator_index] for n in template.nodes] == ["aten::mm", "aten::relu", "aten::mm"]
    assert (template.symbols[0].min, template.symbols[0].max) == (1, 64)
