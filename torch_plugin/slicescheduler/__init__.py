"""Run PyTorch inference through SliceScheduler.

  import slicescheduler
  step = torch.compile(model, backend="slicescheduler", fullgraph=True)     # one line for any model
  step = slicescheduler.compile(model, service_class="online")              # the same with cheap guards
  cache = slicescheduler.StaticCache(model.config, max_cache_len=4096)      # KV that the daemon places
  with slicescheduler.request(deadline_ms=200): ...                         # one user's prefill and decodes

Importing this registers the backend; nothing connects to the daemon before the first call.
"""

from .backend import backend, compile, guard_filter, register
from .errors import *  # noqa: F401,F403
from .options import Options
from .request import Completion, Request, current_request, request
from .session import Session, close_all, session
from .statistics import Stats, stats
from .warmup import RecompileError, warmup
from .weights import share_module

register()


def __getattr__(name):
    if name == "StaticCache":  # imports transformers
        from .static_cache import StaticCache

        return StaticCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [  # noqa: F405
    "Completion", "Options", "RecompileError", "Request", "Session", "StaticCache", "Stats", "backend",
    "close_all", "compile", "current_request", "guard_filter", "request", "session", "share_module", "stats",
    "warmup",
]  # fmt: skip
