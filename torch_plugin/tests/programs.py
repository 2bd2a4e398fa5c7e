"""Small models and captures shared by the tests and by make_golden.py."""

import torch

from slicescheduler._proto import template_pb2 as pb
from slicescheduler.capture import capture_backend

CACHE_LENGTH = 640


def managed_if_written(_tensor, source, written, default):
    """Input kinds of the goldens: what the graph writes is state that the daemon owns."""
    return pb.Input.MANAGED if written else default


class Recorder:
    """A backend that keeps what it captures and runs it with `run(captured) -> callable`."""

    def __init__(self, run=None, kind_of=managed_if_written):
        self.captured = []
        self._run = run
        self.backend = capture_backend(self._on_graph, kind_of=kind_of)

    def _on_graph(self, captured):
        self.captured.append(captured)
        if self._run is not None:
            return self._run(captured)
        return lambda args: zero_outputs(captured, args)


def zero_outputs(captured, args):
    """Outputs of the right shapes, full of zeros."""
    symbols = captured.bind_symbols(args)
    integers = captured.output_integers(symbols)
    return [
        integers.get(i) if layout is None else torch.zeros(layout.sizes, dtype=layout.dtype)
        for i, layout in enumerate(captured.output_layouts(symbols))
    ]


# ---- Llama -------------------------------------------------------------------------------------


def tiny_llama(layers=4, hidden=384, intermediate=1024, heads=8, kv_heads=2, vocab=16000):
    """A LlamaForCausalLM with random weights (default: 18 M parameters, fp32) and its config."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval(), config


def static_cache(config, length, batch=1):
    """A StaticCache with its tensors allocated, marked as having fixed addresses."""
    import transformers

    cache = transformers.StaticCache(config=config, max_cache_len=length)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    cache.early_initialization(
        batch_size=batch, num_heads=kv_heads, head_dim=head_dim, dtype=torch.float32, device=torch.device("cpu")
    )
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values, layer.cumulative_length):
            torch._dynamo.mark_static_address(tensor)
    return cache


def llama_arguments(ids, position, cache, length):
    """Keyword arguments of one forward call: explicit 4-D mask and positions. ids: [batch, n] int64."""
    count = ids.shape[1]
    mask = (torch.arange(count)[:, None] + position >= torch.arange(length))[None, None]
    positions = torch.arange(position, position + count)[None]
    return dict(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        cache=cache,
        use_cache=True,
        logits_to_keep=1,
    )


def mark_prefill(arguments, length):
    """Makes the token count of a prefill call symbolic in [2, length]."""
    for name, axis in (("input_ids", 1), ("attention_mask", 2), ("position_ids", 1)):
        torch._dynamo.mark_dynamic(arguments[name], axis, min=2, max=length)


def capture_llama_templates():
    """(prefill, decode) templates of the tiny Llama."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    model, config = tiny_llama()
    recorder = Recorder()
    step = torch.compile(model, backend=recorder.backend, fullgraph=True)
    cache = static_cache(config, CACHE_LENGTH)
    with torch.inference_mode():
        prefill = llama_arguments(torch.ones(1, 37, dtype=torch.int64), 0, cache, CACHE_LENGTH)
        mark_prefill(prefill, CACHE_LENGTH)
        step(**prefill)
        step(**llama_arguments(torch.ones(1, 1, dtype=torch.int64), 37, cache, CACHE_LENGTH))
    assert len(recorder.captured) == 2, f"{len(recorder.captured)} graphs"
    return [captured.template for captured in recorder.captured]


# ---- MLP ---------------------------------------------------------------------------------------


class TinyMlp(torch.nn.Module):
    """x [s, 16] -> relu(x @ w1) @ w2 -> [s, 8]."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w1 = torch.nn.Parameter(torch.randn(16, 32, generator=generator))
        self.w2 = torch.nn.Parameter(torch.randn(32, 8, generator=generator))

    def forward(self, x):
        return torch.relu(x @ self.w1) @ self.w2


def capture_mlp_template():
    """Template of TinyMlp with s symbolic in [1, 64]."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    recorder = Recorder()
    model = torch.compile(TinyMlp().eval(), backend=recorder.backend, fullgraph=True)
    x = torch.zeros(5, 16)
    torch._dynamo.mark_dynamic(x, 0, min=2, max=64)
    with torch.inference_mode():
        model(x)
    (captured,) = recorder.captured
    captured.template.symbols[0].min = 1  # torch never puts 1 into a range, but the program allows it
    return captured.template
