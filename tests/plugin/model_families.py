"""Small models of transformers with random weights, as an inference server calls them.

QUICK and MORE: name -> function that makes a Case. Models have one layer (two where layers differ) and weights of a few
10 kB: what is checked is that the architecture's operators run through the daemon and answer right, not its size. QUICK has
one of each kind; MORE has variants of the same kinds.
"""

import torch
import transformers
from case import Case


VOCABULARY = 96


def ids(count, batch=2):
    """[batch, count] int64 token ids."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(3, VOCABULARY - 2, (batch, count), generator=generator)


def mask(count, batch=2, padding=2):
    """[batch, count] int64; the first sequence has `padding` tokens of padding on the left."""
    ones = torch.ones(batch, count, dtype=torch.int64)
    ones[0, :padding] = 0
    return ones


def model(name, dtype=torch.float32, cls=None, **config):
    """A model of class `cls` in eval mode, for `name`Config(**config)."""
    torch.manual_seed(0)
    settings = getattr(transformers, f"{name}Config")(**config)
    return getattr(transformers, cls or f"{name}ForCausalLM")(settings).eval().to(dtype)


SEVERAL = (7, 12)  # lengths for cases with a dynamic length


def texts(program, lengths, padding_side="left", **keywords):
    """A Case of padded token batches, one per length; with several lengths they are dynamic and share one graph."""
    masks = [mask(n) if padding_side == "left" else mask(n).flip(1) for n in lengths]
    calls = [((), dict(input_ids=ids(n), attention_mask=m, **keywords)) for n, m in zip(lengths, masks)]
    return Case(program, calls, dict(input_ids=(1,), attention_mask=(1,)) if len(lengths) > 1 else {})


def decoder(name, dtype=torch.float32, cls=None, lengths=(7,), **config):
    """A causal language model on padded prompts. A size of None: the configuration has no such entry."""
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    sizes.update(config)
    sizes = {key: value for key, value in sizes.items() if value is not None}
    return texts(model(name, dtype, cls, **sizes), lengths, use_cache=False)


def encoder(name, cls=None, lengths=(7,), **config):
    """An encoder on padded sequences. A size of None: the configuration has no such entry."""
    sizes = dict(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    sizes.update(config)
    sizes = {key: value for key, value in sizes.items() if value is not None}
    return texts(model(name, cls=cls or f"{name}Model", **sizes), lengths, "right")


def sequence_to_sequence(name, cls, **config):
    program = model(name, cls=cls, vocab_size=VOCABULARY, decoder_start_token_id=0, **config)
    return texts(program, (7,), "right", decoder_input_ids=ids(4), use_cache=False)


def t5_encoder():
    program = model("T5", cls="T5EncoderModel", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    return texts(program, SEVERAL, "right")


def t5(**config):
    return sequence_to_sequence(
        "T5", "T5ForConditionalGeneration", d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, **config
    )


def bart():
    return sequence_to_sequence(
        "Bart", "BartForConditionalGeneration", d_model=32, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


def whisper():
    program = model(
        "Whisper", cls="WhisperForConditionalGeneration", vocab_size=VOCABULARY, num_mel_bins=16, d_model=32,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48,
        decoder_ffn_dim=48, max_source_positions=20, max_target_positions=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    features = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(1))
    return Case(program, [((), dict(input_features=features, decoder_input_ids=ids(4), use_cache=False))])


def images(count, size=16, seed=0):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def vit():
    program = model(
        "ViT", cls="ViTForImageClassification", hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, image_size=16, patch_size=4,
    )  # fmt: skip
    calls = [((), dict(pixel_values=images(n))) for n in (2, 3)]
    return Case(program, calls, {"pixel_values": (0,)})


def clip():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    text = dict(vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=1, eos_token_id=VOCABULARY - 1, **sizes)
    program = model(
        "CLIP", cls="CLIPModel", text_config=text, vision_config=dict(image_size=16, patch_size=4, **sizes), projection_dim=16
    )
    return texts(program, (7,), "right", pixel_values=images(2))


def siglip():
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    text = dict(vocab_size=VOCABULARY, max_position_embeddings=16, **sizes)
    program = model("Siglip", cls="SiglipModel", text_config=text, vision_config=dict(image_size=16, patch_size=4, **sizes))
    return Case(program, [((), dict(input_ids=ids(16), pixel_values=images(2)))])


def resnet():
    program = model(
        "ResNet", cls="ResNetForImageClassification", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    return Case(program, [((), dict(pixel_values=images(n, 32))) for n in (2, 3)], {"pixel_values": (0,)})


def wav2vec2():
    program = model(
        "Wav2Vec2", cls="Wav2Vec2ForCTC", vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=4,
        intermediate_size=48, conv_dim=(16, 16), conv_stride=(4, 2), conv_kernel=(8, 3), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, pad_token_id=0,
    )  # fmt: skip
    sound = torch.randn(2, 400, generator=torch.Generator().manual_seed(1))
    return Case(program, [((), dict(input_values=sound))], exact=False)  # weight norm is taken apart


def mamba():
    program = model(
        "Mamba", vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, use_mambapy=False,
    )  # fmt: skip
    return Case(program, [((), dict(input_ids=ids(6), use_cache=False))])


def mean_pooling():
    """A sentence embedding model: encoder, mean over the tokens that are no padding, unit length."""

    class Embedder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = encoder("Bert").program

        def forward(self, input_ids, attention_mask):
            hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            weights = attention_mask.unsqueeze(-1).expand(hidden.size()).float()
            pooled = (hidden * weights).sum(1) / torch.clamp(weights.sum(1), min=1e-9)
            return {"sentence_embedding": torch.nn.functional.normalize(pooled, p=2, dim=1)}

    return texts(Embedder().eval(), SEVERAL, "right")


def last_token_pooling():
    """An embedding model on a decoder: the hidden state of each sequence's last token."""

    class Embedder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = decoder("Qwen2", cls="Qwen2Model").program

        def forward(self, input_ids, attention_mask):
            hidden = self.decoder(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).last_hidden_state
            last = attention_mask.sum(dim=1) - 1
            pooled = hidden[torch.arange(hidden.shape[0], device=hidden.device), last]
            return torch.nn.functional.normalize(pooled, dim=-1)

    return texts(Embedder().eval(), SEVERAL, "right")


def with_cache():
    """A decoder that makes a KV cache of its own and returns it."""
    case = decoder("Llama")
    ((_, keywords),) = case.calls
    return Case(case.program, [((), dict(keywords, use_cache=True))])


MOE = dict(num_experts_per_tok=2)
NO_NAMES = dict.fromkeys(  # of configurations with names of their own
    ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
     "max_position_embeddings")
)  # fmt: skip
GPT = {**NO_NAMES, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64}
DISTIL = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"))
LLAMA_3_ROPE = dict(
    rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip

QUICK = {
    "llama": lambda: decoder("Llama", lengths=SEVERAL),
    "llama-bf16": lambda: decoder("Llama", torch.bfloat16),
    "qwen2": lambda: decoder("Qwen2"),
    "qwen3": lambda: decoder("Qwen3", head_dim=8),
    "mistral": lambda: decoder("Mistral", sliding_window=5),
    "gemma": lambda: decoder("Gemma", head_dim=8),
    "gemma2": lambda: decoder("Gemma2", head_dim=8, sliding_window=5, num_hidden_layers=2),
    "phi3": lambda: decoder("Phi3"),
    "falcon": lambda: decoder("Falcon", intermediate_size=None, num_key_value_heads=None),
    "gpt2": lambda: decoder("GPT2", cls="GPT2LMHeadModel", **GPT),
    "gpt-neox": lambda: decoder("GPTNeoX", num_key_value_heads=None),
    "opt": lambda: decoder("OPT", ffn_dim=48, word_embed_proj_dim=32, intermediate_size=None, num_key_value_heads=None),
    "bloom": lambda: decoder("Bloom", **{**NO_NAMES, "hidden_size": 32, "n_layer": 1, "n_head": 4}),
    "mixtral": lambda: decoder("Mixtral", num_local_experts=4, **MOE),
    "mamba": mamba,
    "bert": lambda: encoder("Bert", lengths=SEVERAL),
    "roberta": lambda: encoder("Roberta"),
    "distilbert": lambda: encoder("DistilBert", dim=32, n_layers=1, n_heads=4, hidden_dim=48, **DISTIL),
    "t5": t5,
    "bart": bart,
    "whisper": whisper,
    "wav2vec2": wav2vec2,
    "vit": vit,
    "clip": clip,
    "mean-pooling": mean_pooling,
    "last-token-pooling": last_token_pooling,
}

MORE = {
    "llama-fp16": lambda: decoder("Llama", torch.float16),
    "llama-3-rope": lambda: decoder("Llama", rope_parameters=LLAMA_3_ROPE),
    "llama-cache": with_cache,
    "gemma3": lambda: decoder(
        "Gemma3Text", cls="Gemma3ForCausalLM", head_dim=8, sliding_window=5, num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi": lambda: decoder("Phi"),
    "olmo2": lambda: decoder("Olmo2"),
    "stablelm": lambda: decoder("StableLm"),
    "gptj": lambda: decoder("GPTJ", rotary_dim=4, **GPT),
    "qwen2-moe": lambda: decoder(
        "Qwen2Moe", num_experts=4, moe_intermediate_size=16, shared_expert_intermediate_size=16, **MOE
    ),
    "bert-classifier": lambda: encoder("Bert", cls="BertForSequenceClassification"),
    "bert-mlm": lambda: encoder("Bert", cls="BertForMaskedLM"),
    "xlm-roberta": lambda: encoder("XLMRoberta"),
    "electra": lambda: encoder("Electra", embedding_size=32),
    "deberta-v2": lambda: encoder("DebertaV2", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]),
    "mpnet": lambda: encoder("MPNet"),
    "modernbert": lambda: encoder("ModernBert", local_attention=6, num_hidden_layers=2, lengths=SEVERAL),
    "t5-gated": lambda: t5(feed_forward_proj="gated-gelu"),
    "t5-encoder": t5_encoder,
    "siglip": siglip,
    "resnet": resnet,
}
