"""A transformers StaticCache whose tensors the daemon owns.

Keys, values and lengths are managed tensors: the daemon may keep them on any device and move them, graphs
update them, and this process never writes them. `reset`, `crop` and reads are commands, ordered with the graphs
that were submitted before. The tensors' memory here is a read-only mapping: only compiled graphs may run on such a
cache, and using it eagerly raises an error instead of crashing the process.
"""

import warnings
import weakref

import torch
import transformers
from transformers.cache_utils import StaticLayer

from .errors import DaemonUnavailable, InvalidArgument, Unsupported
from .session import ManagedGroup, session as default_session


class ManagedLayer(StaticLayer):
    """One layer of a managed StaticCache. Commands go through the cache, which knows all layers."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not torch.compiler.is_compiling():
            raise InvalidArgument(
                "a managed cache is written by the daemon only: run the model compiled with "
                'backend="slicescheduler", or use transformers.StaticCache for eager runs'
            )
        return super().update(key_states, value_states, *args, **kwargs)

    def get_seq_length(self):
        if torch.compiler.is_compiling():
            return super().get_seq_length()
        return int(self._slice_group.read([self._slice_first + 2])[0])

    def reset(self):
        raise InvalidArgument("reset the whole cache: cache.reset()")

    def crop(self, tokens_to_remove):
        raise InvalidArgument("crop the whole cache: cache.crop(n)")

    def reorder_cache(self, beam_idx):
        raise Unsupported("beam search reorders a cache in place, which a managed cache cannot do")

    batch_repeat_interleave = batch_select_indices = offload = prefetch = reorder_cache


class StaticCache(transformers.StaticCache):
    """`cache = slicescheduler.StaticCache(model.config, max_cache_len=4096)`

    Args:
      config: the model's config. Sliding window layers are not supported: use transformers.StaticCache for
        those models (its tensors then stay in this process's shared memory and are pinned to one device).
      max_cache_len: tokens it can hold.
      batch_size, dtype: of the keys and values; dtype defaults to the config's, else float32.
      session: default slicescheduler.session().
      strict: False: without a daemon this is a plain transformers StaticCache, after one warning.
    `managed` says which of the two it is. Errors: DaemonUnavailable, Quota, NeverFits, Unsupported.
    """

    def __init__(self, config, max_cache_len, batch_size=1, dtype=None, session=None, strict=True):
        super().__init__(config=config, max_cache_len=max_cache_len)
        text = config.get_text_config(decoder=True)
        dtype = dtype or getattr(text, "dtype", None) or torch.float32
        kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        self._slice_group = None
        try:
            self._allocate(session or default_session(), batch_size, kv_heads, head_dim, dtype)
        except DaemonUnavailable as error:
            if strict:
                raise
            warnings.warn(f"slicescheduler: a plain StaticCache, because strict=False and: {error}", stacklevel=2)
            self.early_initialization(batch_size, kv_heads, head_dim, dtype, torch.device("cpu"))

    @property
    def managed(self):
        """True if the daemon owns the tensors."""
        return self._slice_group is not None

    def _allocate(self, session, batch_size, kv_heads, head_dim, dtype):
        odd = sorted({type(layer).__name__ for layer in self.layers if type(layer) is not StaticLayer})
        if odd:
            raise Unsupported(
                f"layers of type {', '.join(odd)} cannot be managed: use transformers.StaticCache for this model"
            )
        specs = []
        for i, layer in enumerate(self.layers):
            shape = (batch_size, kv_heads, layer.max_cache_len, head_dim)
            specs.append((f"layers.{i}.keys", dtype, shape))
            specs.append((f"layers.{i}.values", dtype, shape))
            specs.append((f"layers.{i}.length", torch.int64, ()))
        group = ManagedGroup(session, specs)
        for i, layer in enumerate(self.layers):
            layer.__class__ = ManagedLayer
            layer._slice_group, layer._slice_first = group, 3 * i
            layer.device = torch.device("cpu")
            layer.dtype = dtype
            layer.batch_size, layer.num_heads = batch_size, kv_heads
            layer.k_head_dim = layer.v_head_dim = head_dim
            layer.keys, layer.values, layer.cumulative_length = group.tensors[3 * i : 3 * i + 3]
            layer.is_initialized = True
        self._slice_group = group
        weakref.finalize(self, session.retired.append, group).atexit = False

    @property
    def _contents(self):
        return [i for i in range(3 * len(self.layers)) if i % 3 != 2]

    @property
    def _lengths(self):
        return range(2, 3 * len(self.layers), 3)

    def reset(self):
        """Empties the cache, after all graphs submitted before. Makes it usable again after StateLost."""
        if not self.managed:
            return super().reset()
        self._slice_group.reset()

    def crop(self, tokens):
        """Shortens the cache: negative removes that many tokens (as in transformers), positive keeps that many,
        0 changes nothing. Errors: InvalidArgument if it holds fewer; StateLost."""
        if not self.managed:
            return super().crop(tokens if tokens <= 0 else min(0, tokens - int(self.get_seq_length())))
        if tokens == 0:
            return
        length = int(self.get_seq_length())
        kept = tokens if tokens > 0 else length + tokens
        if not 0 <= kept <= length:
            raise InvalidArgument(f"crop({tokens}) of a cache that holds {length} tokens")
        self._slice_group.crop(self._contents, 2, kept)
        self._slice_group.fill(self._lengths, kept)

    def read(self, layer=None):
        """Copies of the contents: [(keys, values)] of all layers, or (keys, values) of one.

        Shape [batch, kv heads, max_cache_len, head dim]; what lies beyond the length is undefined.
        """
        if layer is not None:
            if not self.managed:
                return self.layers[layer].keys.clone(), self.layers[layer].values.clone()
            return tuple(self._slice_group.read([3 * layer, 3 * layer + 1]))
        return [self.read(i) for i in range(len(self.layers))]

    def reorder_cache(self, beam_idx):
        if self.managed:
            self.layers[0].reorder_cache(beam_idx)
        return super().reorder_cache(beam_idx)
