"""A small Llama that answers one request at a time: what the two demo tenants share.

`Server` is written once and takes any forward function and any static cache: with plain PyTorch it gives the expected
answers, with the compiled model and slicescheduler.StaticCache the same code runs through the daemon.
"""

import dataclasses
import time

import torch
import transformers

CHUNK_TOKENS = 128   # longest piece of a prompt per call: bounds how long one operator keeps a device
CACHE_TOKENS = 640
VOCABULARY = 16000


def build_model():
    """A LlamaForCausalLM of 18 M parameters with random weights (the same in every process), and its config."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=2048, tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval(), config


def eager_cache(config):
    """transformers' own static cache, allocated before the first call."""
    cache = transformers.StaticCache(config=config, max_cache_len=CACHE_TOKENS)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cache.early_initialization(
        batch_size=1, num_heads=config.num_key_value_heads, head_dim=head_dim, dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return cache


def make_prompt(seed, count):
    """`count` token ids, [1, count]."""
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


@dataclasses.dataclass
class Answer:
    """tokens: ids, in order. logits: of the first and of the last token, whole rows; the last depends on every entry of
    the KV cache. chosen: the logit of each chosen token. step_ns: when each call of the model returned, with the tokens
    that it processed."""

    tokens: list
    logits: torch.Tensor
    chosen: list
    step_ns: list


def difference(expected, answer, tolerance=1e-6):
    """Why `answer` is wrong, or None. Token ids must be equal, logits within `tolerance` absolute."""
    if answer.tokens != expected.tokens:
        first = next((i for i, (a, b) in enumerate(zip(answer.tokens, expected.tokens)) if a != b), len(answer.tokens))
        return f"token {first} differs: {answer.tokens[first:first + 3]} instead of {expected.tokens[first:first + 3]}"
    worst = (answer.logits - expected.logits).abs().max().item()
    worst = max([worst, *(abs(a - b) for a, b in zip(answer.chosen, expected.chosen))])
    # "not <=" also refuses NaN.
    return None if worst <= tolerance else f"logits differ by {worst:.3g}, more than {tolerance}"


class Server:
    """forward: the model or its compiled form. cache: its static cache; reset at the start of each request."""

    def __init__(self, forward, cache):
        self.forward = forward
        self.cache = cache

    def step(self, ids, position):
        """Logits of the last of `ids` ([1, n]), which follow `position` tokens in the cache."""
        count = ids.shape[1]
        positions = torch.arange(position, position + count)
        mask = (positions[:, None] >= torch.arange(CACHE_TOKENS))[None, None]  # True: attend
        positions = positions[None]
        if count > 1:  # prompts of any length use one graph
            for tensor, dimension in ((ids, 1), (mask, 2), (positions, 1)):
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        return self.forward(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=self.cache, use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]

    @torch.inference_mode()
    def answer(self, prompt, output_tokens):
        """Prompt in chunks, then one token per call, always the likeliest."""
        self.cache.reset()
        step_ns = []
        for begin in range(0, prompt.shape[1], CHUNK_TOKENS):
            chunk = prompt[:, begin:begin + CHUNK_TOKENS].clone()
            logits = self.step(chunk, begin)
            step_ns.append((time.monotonic_ns(), chunk.shape[1]))
        tokens, chosen, first = [], [], logits.clone()
        position = prompt.shape[1]
        while True:
            token = int(logits.argmax(-1))
            tokens.append(token)
            chosen.append(float(logits[0, token]))
            if len(tokens) == output_tokens:
                return Answer(tokens, torch.cat([first, logits]), chosen, step_ns)
            logits = self.step(torch.tensor([[token]]), position)
            step_ns.append((time.monotonic_ns(), 1))
            position += 1
