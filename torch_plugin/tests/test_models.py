"""Whole models through capture, template and reference interpreter, bit by bit against eager."""

import pytest
import torch

import programs
from reference import Reference
from slicescheduler._proto import template_pb2 as pb

transformers = pytest.importorskip("transformers")

LENGTH = 64


def interpreted(module, kind_of=programs.managed_if_written):
    """Compiles `module` onto the reference interpreter. Returns (callable, list of interpreters)."""
    interpreters = []

    def run(captured):
        interpreters.append(Reference(captured))
        return interpreters[-1]

    recorder = programs.Recorder(run=run, kind_of=kind_of)
    return torch.compile(module, backend=recorder.backend, fullgraph=True), interpreters


def greedy(step, cache, prompts, steps, mark):
    """Logits of prefill and `steps` decode steps for each prompt, with one cache that is reset between."""
    logits = []
    for prompt in prompts:
        cache.reset()
        arguments = programs.llama_arguments(prompt, 0, cache, LENGTH)
        if mark:
            programs.mark_prefill(arguments, LENGTH)
        out = step(**arguments).logits
        logits.append(out.clone())
        for i in range(steps):
            token = out[:, -1:].argmax(-1)
            out = step(**programs.llama_arguments(token, prompt.shape[1] + i, cache, LENGTH)).logits
            logits.append(out.clone())
    return logits


def prompts_of(lengths, vocab):
    return [torch.randint(0, vocab, (1, n), generator=torch.Generator().manual_seed(n)) for n in lengths]


@pytest.fixture(scope="module")
def llama():
    return programs.tiny_llama(hidden=64, intermediate=128, heads=4, kv_heads=2, vocab=500)


def test_Happy_llama_prefill_and_decode_equal_eager(llama):
    model, config = llama
    prompts = prompts_of((5, 9, 16, 31, 40), config.vocab_size)
    step, interpreters = interpreted(model)
    with torch.inference_mode():
        ours, theirs = programs.static_cache(config, LENGTH), programs.static_cache(config, LENGTH)
        expected = greedy(model, theirs, prompts, 6, mark=False)
        got = greedy(step, ours, prompts, 6, mark=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert torch.equal(a.cumulative_length, b.cumulative_length)
    assert [run.calls for run in interpreters] == [5, 30]
    assert not any(run.stride_differences for run in interpreters)
    for run in interpreters:
        for peak, declared in run.peaks.values():
            assert peak <= declared <= peak * 1.1 + 2048


def test_Happy_llama_layers_share_one_signature(llama):
    model, config = llama
    step, interpreters = interpreted(model)
    with torch.inference_mode():
        greedy(step, programs.static_cache(config, LENGTH), prompts_of((7,), config.vocab_size), 1, mark=True)
    for run in interpreters:
        template = run.template
        groups = template.groups
        layers = [group for group in groups if ".layers." in group.name]
        assert len(groups) == 6 and len(layers) == 4
        assert len({group.signature for group in layers}) == 1
        assert len({group.signature for group in groups}) == 3
        assert not any("copy_" in name and "index" not in name for name in template.operators)
        for group in layers:
            assert len(group.outputs) == 1  # the hidden state
            names = [template.inputs[i].name for i in group.writes]
            assert [name.rsplit(".", 1)[1] for name in names] == ["cumulative_length", "keys", "values"]
            assert set(group.writes) <= set(group.reads)
        kinds = [entry.kind for entry in template.inputs]
        assert kinds.count(pb.Input.MANAGED) == 12 and kinds.count(pb.Input.STATIC_CONSTANT) == 40
        assert all(entry.written == (entry.kind == pb.Input.MANAGED) for entry in template.inputs)


def test_Happy_equal_programs_give_equal_bytes(llama):
    model, config = llama
    captures = []
    for _ in range(2):
        torch._dynamo.reset()
        step, interpreters = interpreted(model)
        with torch.inference_mode():
            greedy(step, programs.static_cache(config, LENGTH), prompts_of((7,), config.vocab_size), 1, mark=True)
        captures.append([run.captured.template_bytes for run in interpreters])
    assert captures[0] == captures[1]


def test_Happy_gpt2_equals_eager():
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=500, n_positions=128, n_embd=64, n_layer=3, n_head=4)
    model = transformers.GPT2LMHeadModel(config).eval()
    step, interpreters = interpreted(model)
    prompts = prompts_of((5, 12, 33), config.vocab_size)
    with torch.inference_mode():
        expected = greedy(model, programs.static_cache(config, LENGTH), prompts, 4, mark=False)
        got = greedy(step, programs.static_cache(config, LENGTH), prompts, 4, mark=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
    for run in interpreters:
        blocks = [group for group in run.template.groups if ".h." in group.name]
        assert len(blocks) == 3 and len({group.signature for group in blocks}) == 1


def test_Happy_bert_equals_eager():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=500, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128
    )
    model = transformers.BertModel(config).eval()
    compiled, interpreters = interpreted(model)
    with torch.inference_mode():
        for length in (7, 12, 30):
            (ids,) = prompts_of((length,), config.vocab_size)
            ids = ids.repeat(2, 1)
            mask = torch.ones(2, length, dtype=torch.int64)
            mask[1, length - 2 :] = 0
            expected = model(input_ids=ids, attention_mask=mask)
            torch._dynamo.maybe_mark_dynamic(ids, 1)
            torch._dynamo.maybe_mark_dynamic(mask, 1)
            got = compiled(input_ids=ids, attention_mask=mask)
            assert torch.equal(expected.last_hidden_state, got.last_hidden_state)
            assert torch.equal(expected.pooler_output, got.pooler_output)
    assert len(interpreters) == 1
    layers = [group for group in interpreters[0].template.groups if ".layer." in group.name]
    assert len({group.signature for group in layers}) == 1 and len(layers) == 3


class ConvNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 16, 3, padding=1)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1))
            for _ in range(3)
        )
        self.head = torch.nn.Linear(16, 10)

    def forward(self, image):
        x = self.stem(image)
        for block in self.blocks:
            x = x + block(x)
        return self.head(torch.nn.functional.adaptive_avg_pool2d(x, 1).flatten(1)), x


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_Happy_convolutions_equal_eager(memory_format):
    torch.manual_seed(0)
    model = ConvNet().eval()
    compiled, interpreters = interpreted(model)
    with torch.inference_mode():
        for batch in (2, 3):
            image = torch.randn(batch, 3, 16, 16).to(memory_format=memory_format)
            expected = model(image)
            torch._dynamo.maybe_mark_dynamic(image, 0)
            got = compiled(image)
            assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(expected, got, strict=True))
    assert interpreters[0].calls == 2


def test_Happy_mlp_and_symbol_binding():
    model = programs.TinyMlp().eval()
    compiled, interpreters = interpreted(model)
    with torch.inference_mode():
        for count in (5, 2, 64):
            x = torch.randn(count, 16)
            torch._dynamo.maybe_mark_dynamic(x, 0)
            assert torch.equal(compiled(x), model(x))
    (run,) = interpreters
    captured = run.captured
    args = [model.w1, 7, torch.zeros(7, 16), model.w2]
    assert captured.bind_symbols(args) == (7,)
    (layout,) = captured.output_layouts((7,))
    assert (layout.dtype, layout.sizes, layout.strides) == (torch.float32, (7, 8), (8, 1))
    assert captured.output_layouts((7,)) is captured.output_layouts((7,))
    assert captured.argument_count == 4 and captured.extra_inputs == ()
