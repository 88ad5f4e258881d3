"""Every hooked name exists in the pinned SGLang, and a missing one stops the start."""

from __future__ import annotations

import pkgutil

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_chunk_cache.host import hooks
from sglang_chunk_cache.host.hooks import FLAG_HOOKS, HOOKS, Hook
from sglang_chunk_cache.server_args import StartRefused

ALL = FLAG_HOOKS + HOOKS


@pytest.mark.parametrize("hook", ALL, ids=[hook.target.removeprefix("sglang.srt.") for hook in ALL])
def test_target_and_handler_exist(hook):
    parent, _, name = hook.target.rpartition(".")
    assert callable(getattr(pkgutil.resolve_name(parent), name))
    assert callable(hook.resolve())
    assert hook.why


@pytest.fixture
def registry(monkeypatch):
    """SGLang's registry, empty, and left as it was."""
    saved_hooks, saved_patched = dict(HookRegistry._hooks), set(HookRegistry._patched)
    HookRegistry.reset()
    monkeypatch.setattr(hooks, "_expected", ())
    monkeypatch.setattr(hooks, "_wrapped", set())
    yield HookRegistry
    HookRegistry.reset()
    HookRegistry._hooks.update(saved_hooks)
    HookRegistry._patched.update(saved_patched)


MISSING = Hook("sglang.srt.server_args.no_such_name", HookType.AROUND, "json:dumps", "test")
# A name whose wrapping does not matter to other tests.
TARGET = "sglang.srt.utils.network.get_free_port"


def test_missing_target_stops_the_start(registry):
    with pytest.raises(StartRefused, match="no_such_name could not be hooked"):
        hooks.apply_hooks((MISSING,))


def test_missing_handler_stops_the_start(registry):
    with pytest.raises(StartRefused, match="no_such_handler"):
        hooks.apply_hooks((Hook(TARGET, HookType.AROUND, "json:no_such_handler", "test"),))


def test_a_registered_hook_that_was_not_applied_is_noticed(registry):
    hooks.register_hooks((MISSING,))
    registry.apply_hooks()
    with pytest.raises(StartRefused, match="no_such_name"):
        hooks.verify_hooks()


def around(original, *args, **kwargs):
    return ("ours", original(*args, **kwargs))


def test_a_target_that_another_plugin_wrapped_is_wrapped_once_more(registry, monkeypatch):
    parent = pkgutil.resolve_name(TARGET.rpartition(".")[0])
    monkeypatch.setattr(parent, "get_free_port", lambda: 1)
    monkeypatch.setattr(Hook, "resolve", lambda self: around)
    registry.register(TARGET, lambda original: ("theirs", original()), HookType.AROUND)
    registry.apply_hooks()
    hooks.apply_hooks((Hook(TARGET, HookType.AROUND, "unused:unused", "test"),))
    assert parent.get_free_port() == ("ours", ("theirs", 1))
    hooks.verify_hooks()


def test_off_registers_the_flags_only(registry, monkeypatch):
    from sglang_chunk_cache import plugin

    monkeypatch.delenv("SGLANG_CHUNK_CACHE", raising=False)
    plugin.register()
    assert set(registry._hooks) == {hook.target for hook in FLAG_HOOKS}
