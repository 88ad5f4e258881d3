"""Applies the hooks that `hook_table` lists.

Verbs: `register_hooks` (replaces classes now, has SGLang's `load_plugins` wrap functions), `apply_hooks` (all now),
`verify_hooks` (stops the start if a name does not carry our handler).

Promises: nothing in `HOOKS` is applied while `--chunk-cache` is off; a handler is imported only when it is applied;
where the chunk cache is on, a name that is missing in this version of SGLang, or a class that another plugin replaces
too, stops the start. SGLang itself only logs such a failure, and a server without one of these hooks gives plausible
wrong answers. A function that another plugin wraps too carries both wrappers.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

from sglang_chunk_cache.flags.server_args import RADIX_CACHE_BACKEND, refuse
from sglang_chunk_cache.start.hook_table import API_HOOKS, FLAG_HOOKS, HOOKS, OVERRIDES, SCHEDULER_HOOKS, Hook

__all__ = ["API_HOOKS", "FLAG_HOOKS", "HOOKS", "SCHEDULER_HOOKS", "Hook"]

_SOURCE = HookSource(plugin_name="chunk_cache", dist_name=None)
_expected: tuple[Hook, ...] = ()  # what this process needs
_wrapped: set[str] = set()  # targets that carry our handlers although another plugin had wrapped them before


def _has_ours(target: str) -> bool:
    return any(source == _SOURCE for _, _, source in HookRegistry._hooks.get(target, ()))


def register_hooks(hooks: Iterable[Hook]) -> None:
    """Replaces classes now, and registers wrappers with SGLang; `load_plugins` applies them with those of others.

    From then on `verify_hooks` expects all of them in this process.

    Raises:
        StartRefused: another plugin replaces a class too.
    """
    global _expected
    hooks = tuple(hooks)
    _expected += tuple(hook for hook in hooks if hook not in _expected)
    for hook in hooks:
        if _has_ours(hook.target) or hook.target in _wrapped:
            continue
        handler = hook.resolve()
        if hook.replaces_class:
            _check_alone(hook)
        HookRegistry.register(hook.target, handler, hook.kind, source=_SOURCE)
        if hook.replaces_class:
            _replace_class(hook.target, handler)


def _replace_class(target: str, ours: type) -> None:
    """Puts `ours` in the place of the class that it extends, for SGLang and for the subclasses that exist already.

    This happens at once, not with the registry's other hooks, so that a subclass that is defined later has ours as its
    base. Afterwards only `ours`, type hints, and instances that were made before refer to the original.

    Raises:
        StartRefused: another plugin's subclass cannot take ours as its base.
    """
    original = pkgutil.resolve_name(target)
    HookRegistry._apply_target(target, [(HookType.REPLACE, ours, _SOURCE)])
    HookRegistry._patched.add(target)
    for subclass in original.__subclasses__():
        if ours in subclass.__mro__:  # not issubclass: an abstract class would cache its answer
            continue
        try:
            subclass.__bases__ = tuple(ours if base is original else base for base in subclass.__bases__)
        except TypeError as error:
            name = f"{subclass.__module__}.{subclass.__qualname__}"
            refuse(f"{name}, a subclass of {target}, cannot get what the chunk cache adds to it: {error}.")


def _check_alone(hook: Hook) -> None:
    """Checks that a class is SGLang's own or already ours.

    Raises:
        StartRefused: another plugin has replaced it, or has asked SGLang's registry to.
    """
    found = pkgutil.resolve_name(hook.target)
    others = [other for kind, other, source in HookRegistry._hooks.get(hook.target, ())
              if kind is HookType.REPLACE and source != _SOURCE]  # fmt: skip
    if found is not hook.resolve() and f"{found.__module__}.{found.__qualname__}" != hook.target:
        others.append(found)
    if others:
        names = ", ".join(dict.fromkeys(f"{other.__module__}.{other.__qualname__}" for other in others))
        refuse(f"another SGLang plugin replaces {hook.target} too, by {names}; drop one of the two plugins.")


def apply_hooks(hooks: Iterable[Hook] = HOOKS) -> None:
    """Applies the hooks now, after `load_plugins` ran, and verifies them.

    The registry skips a target that another plugin has wrapped already, so such a target is wrapped once more here.

    Raises:
        StartRefused: a target or a handler is not there, or another plugin replaces a class too.
    """
    hooks = tuple(hooks)
    for hook in hooks:
        taken = hook.target in HookRegistry._patched and not _has_ours(hook.target) and hook.target not in _wrapped
        if taken and not hook.replaces_class:
            HookRegistry._apply_target(hook.target, [(hook.kind, hook.resolve(), _SOURCE)])
            _wrapped.add(hook.target)
    register_hooks(hooks)
    HookRegistry.apply_hooks()
    verify_hooks()


def missing_hooks() -> list[str]:
    """The targets that should carry our handlers in this process and do not."""
    return [
        hook.target
        for hook in _expected
        if hook.target not in _wrapped and not (hook.target in HookRegistry._patched and _has_ours(hook.target))
    ]


def missing_overrides() -> list[str]:
    """The names that our classes override and that SGLang's classes do not have."""
    missing = []
    for handler in OVERRIDES:
        theirs = [base for base in pkgutil.resolve_name(handler).__mro__ if base.__module__.startswith("sglang.")]
        has = {name for base in theirs for name in vars(base)}
        missing += [f"{theirs[0].__qualname__}.{name}" for name in OVERRIDES[handler] if name not in has]
    return sorted(missing)


def verify_hooks() -> None:
    """Checks that every hook that was registered in this process is applied, and every class ours alone.

    Raises:
        StartRefused: one is not, and the sentence names it.
    """
    from sglang.version import __version__

    missing = missing_hooks() + missing_overrides()
    if missing:
        refuse(f"SGLang {__version__} does not fit, {', '.join(missing)} could not be hooked; install sglang 0.5.23.")
    for hook in _expected:
        if hook.replaces_class:
            _check_alone(hook)


def register_radix_cache() -> None:
    """Registers our radix cache with SGLang under the name that a server selects it by."""
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(RADIX_CACHE_BACKEND) is None:
        register_radix_cache_backend(RADIX_CACHE_BACKEND, _create_radix_cache)


def _create_radix_cache(ctx: object) -> object:
    verify_hooks()  # in this process
    return pkgutil.resolve_name("sglang_chunk_cache.host.radix_cache:create")(ctx)
