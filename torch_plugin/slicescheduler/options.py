"""Options of the backend: `torch.compile(..., backend="slicescheduler", options={...})`.

Pure Python: checks names and types once, when a program is compiled.
"""

import dataclasses
import difflib
import math
import os

from .errors import InvalidArgument

# Options that choose the session.
SESSION_KEYS = ("socket", "name", "service_class", "weight", "home_device", "arena_bytes")


@dataclasses.dataclass(frozen=True)
class Options:
    """
    service_class ("class"): "online" or "offline".
    deadline_ms: deadline of a run outside any request(), from its submit; None = none.
    socket, name, weight, home_device, arena_bytes: of the session, see slicescheduler.session().
    strict: True: what cannot run through the daemon is an error. False: it runs eagerly in this process, with one
      warning, counted in stats().bypassed_operators; never for graphs that use a managed cache.
    replicate: where weights get replicas: "home", "all", or a list of devices. Default: "all" for offline
      tenants, else "home".
    """

    service_class: str | None = None
    deadline_ms: float | None = None
    socket: str | None = None
    name: str | None = None
    weight: float | None = None
    home_device: str | None = None
    arena_bytes: int | None = None
    strict: bool = True
    replicate: object = None

    @property
    def session_options(self):
        """Keyword arguments for slicescheduler.session()."""
        return {key: getattr(self, key) for key in SESSION_KEYS}


def parse_options(given):
    """dict -> Options. Errors: InvalidArgument for unknown names and wrong values."""
    given = dict(given or {})
    if "class" in given:
        if "service_class" in given:
            raise InvalidArgument('the options "class" and "service_class" are the same: give one of them')
        given["service_class"] = given.pop("class")
    if isinstance(given.get("socket"), os.PathLike):
        given["socket"] = os.fspath(given["socket"])
    known = [field.name for field in dataclasses.fields(Options)]
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(str(name), [*known, "class"], n=1)
            hint = f'; did you mean "{close[0]}"?' if close else ""
            raise InvalidArgument(
                f"unknown option {name!r} of the slicescheduler backend{hint}. Known: class, {', '.join(known)}."
            )
    options = Options(**given)
    if options.service_class not in (None, "online", "offline"):
        raise InvalidArgument(f'the option "class" must be "online" or "offline", not {options.service_class!r}')
    if not isinstance(options.strict, bool):
        raise InvalidArgument(f'the option "strict" must be True or False, not {options.strict!r}')
    for name in ("socket", "name", "home_device"):
        value = getattr(options, name)
        if value is not None and not isinstance(value, str):
            raise InvalidArgument(f'the option "{name}" must be a string, not {value!r}')
    if options.weight is not None and not is_positive(options.weight):
        raise InvalidArgument(f'the option "weight" must be a positive number, not {options.weight!r}')
    if options.arena_bytes is not None and not (isinstance(options.arena_bytes, int) and options.arena_bytes > 0):
        raise InvalidArgument(f'the option "arena_bytes" must be a positive number of bytes, not {options.arena_bytes!r}')
    deadline = options.deadline_ms
    if deadline is not None and not is_positive(deadline):
        raise InvalidArgument(f'the option "deadline_ms" must be a positive number, not {deadline!r}')
    replicate = options.replicate
    names = isinstance(replicate, (list, tuple)) and all(isinstance(device, str) for device in replicate)
    if replicate not in (None, "all", "home") and not names:
        raise InvalidArgument(f'the option "replicate" must be "all", "home" or a list of devices, not {replicate!r}')
    return options


def is_positive(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
