"""What of SGLang is changed: the tables fit the pinned version and the docs, and other plugins are got along with."""

from __future__ import annotations

import json
import pkgutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

import sglang_signatures as signatures
from doc_pages import made_part
from sglang_chunk_cache.flags.server_args import StartRefused
from sglang_chunk_cache.start import hooks
from sglang_chunk_cache.start.hook_table import FLAG_HOOKS, HOOKS, OVERRIDES, Hook

ALL = FLAG_HOOKS + HOOKS
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("hook", ALL, ids=[hook.target.removeprefix("sglang.srt.") for hook in ALL])
def test_target_and_handler_exist(hook):
    parent, _, name = hook.target.rpartition(".")
    assert callable(getattr(pkgutil.resolve_name(parent), name))
    handler = hook.resolve()
    assert hook.replaces_class == isinstance(handler, type)
    if isinstance(handler, type):
        assert len(handler.__bases__) == 1, "or a subclass of SGLang's cannot get it as its base"
    assert hook.why
    assert hook.breaks


def test_the_tables_are_short():
    assert len(ALL) <= 21
    assert len({hook.target for hook in ALL}) == len(ALL)


def test_signatures_are_those_that_the_code_was_written_against():
    assert signatures.check_signatures() == []
    assert signatures.current_signatures() == json.loads(signatures.FILE.read_text()), (
        "python test/sglang_signatures.py"
    )


@pytest.mark.parametrize("handler", [hook.handler for hook in ALL if hook.replaces_class] + list(OVERRIDES))
def test_the_table_has_what_a_class_overrides(handler):
    assert list(OVERRIDES[handler]) == list(signatures.overrides(pkgutil.resolve_name(handler)))


def test_what_differs_is_named(tmp_path, monkeypatch):
    written = {ALL[0].target: "(other)", "sglang.srt.no.such": "()", "sglang.srt.server_args.ServerArgs.gone": "()"}
    monkeypatch.setattr(signatures, "FILE", tmp_path / "signatures.json")
    (tmp_path / "signatures.json").write_text(json.dumps(written))
    monkeypatch.setattr(signatures, "TOUCHED", (signatures.TOUCHED[1], _touch("sglang.srt.server_args.ServerArgs._x")))
    first, second, third, touched = signatures.check_signatures()
    assert first.startswith(f"{ALL[0].target}: is (parser")
    assert first.endswith("and was (other)")
    assert second.startswith("sglang.srt.no.such: gone")
    assert third.startswith("sglang.srt.server_args.ServerArgs.gone: gone")
    assert touched == "sglang.srt.server_args.ServerArgs._x: gone"


def _touch(name: str) -> signatures.Touch:
    return signatures.Touch(name, "x.py", "why", "breaks")


@pytest.mark.parametrize("touch", signatures.TOUCHED_BY_CACHE, ids=lambda touch: touch.name)
def test_what_is_touched_is_touched_where_the_table_says(touch):
    text = (ROOT / "python" / "sglang_chunk_cache" / touch.file).read_text()
    assert touch.name.rpartition(".")[2] in text


def test_the_docs_have_the_tables():
    page = (ROOT / "docs" / "touched.md").read_text()
    assert made_part(signatures.PROGRAM, signatures.tables()) in page, f"python {signatures.PROGRAM}"


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


def hook_of(target: str, kind: HookType, handler: str) -> Hook:
    return Hook(target, kind, handler, "test", "test")


MISSING = hook_of("sglang.srt.server_args.no_such_name", HookType.AROUND, "json:dumps")
# A name whose wrapping does not matter to other tests.
TARGET = "sglang.srt.utils.network.get_free_port"


def test_missing_target_stops_the_start(registry):
    with pytest.raises(StartRefused, match="no_such_name could not be hooked"):
        hooks.apply_hooks((MISSING,))


def test_missing_handler_stops_the_start(registry):
    with pytest.raises(StartRefused, match="no_such_handler"):
        hooks.apply_hooks((hook_of(TARGET, HookType.AROUND, "json:no_such_handler"),))


def test_an_overridden_name_that_is_missing_stops_the_start(registry, monkeypatch):
    from sglang.srt.managers.schedule_policy import PrefillAdder

    monkeypatch.delattr(PrefillAdder, "_replay_len")
    with pytest.raises(StartRefused, match=r"PrefillAdder\._replay_len could not be hooked"):
        hooks.verify_hooks()


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
    hooks.apply_hooks((hook_of(TARGET, HookType.AROUND, "unused:unused"),))
    assert parent.get_free_port() == ("ours", ("theirs", 1))
    hooks.verify_hooks()


def test_off_registers_the_flags_only(registry, monkeypatch):
    from sglang_chunk_cache import plugin

    monkeypatch.delenv("SGLANG_CHUNK_CACHE", raising=False)
    plugin.register()
    assert set(registry._hooks) == {hook.target for hook in FLAG_HOOKS}


# Classes.


@pytest.fixture
def part(monkeypatch):
    """A module of SGLang's with a class, one that imported the class, and our replacement; all made up."""
    module, importer, plugin = (types.ModuleType(name) for name in ("a_part", "an_importer", "a_plugin"))
    for one in (module, importer, plugin):
        monkeypatch.setitem(sys.modules, one.__name__, one)

    class Thing:
        __module__, __qualname__ = "a_part", "Thing"

        def name(self) -> str:
            return "stock"

    class Ours(Thing):
        __module__, __qualname__ = "a_plugin", "Ours"

        def name(self) -> str:
            return f"ours({super().name()})"

    module.Thing = importer.Thing = Thing
    plugin.Ours = Ours
    return types.SimpleNamespace(module=module, importer=importer, ours=Ours, stock=Thing)


CLASS = hook_of("a_part.Thing", HookType.REPLACE, "a_plugin:Ours")


def test_every_subclass_of_a_replaced_class_is_one_of_ours(registry, part):
    class Early(part.stock):
        def name(self) -> str:
            return f"early({super().name()})"

    made_before = Early()
    hooks.apply_hooks((CLASS,))

    class Late(part.module.Thing):
        def name(self) -> str:
            return f"late({super().name()})"

    assert part.importer.Thing is part.module.Thing is part.ours
    assert Early().name() == made_before.name() == "early(ours(stock))"
    assert Late().name() == "late(ours(stock))"
    assert isinstance(Early(), part.ours)
    hooks.apply_hooks((CLASS,))
    assert Late().name() == "late(ours(stock))", "applied once"


def test_a_subclass_that_cannot_get_our_base_stops_the_start(registry, part):
    class Ours(part.stock, Exception):  # of another layout
        __module__, __qualname__ = "a_plugin", "Ours"

    sys.modules["a_plugin"].Ours = Ours
    type("Odd", (part.stock,), {"__module__": "their_plugin"})
    with pytest.raises(StartRefused, match=r"a subclass of a_part\.Thing, cannot get"):
        hooks.apply_hooks((CLASS,))


def replacement(part) -> type:
    return type("Theirs", (part.stock,), {"__module__": "their_plugin"})


REFUSED = r"another SGLang plugin replaces a_part\.Thing too, by their_plugin\.Theirs; drop one of the two plugins\.$"


@pytest.mark.parametrize("is_applied", [False, True])
def test_a_class_that_another_plugin_replaces_stops_the_start(registry, part, is_applied):
    registry.register("a_part.Thing", replacement(part), HookType.REPLACE)
    if is_applied:
        registry.apply_hooks()
    with pytest.raises(StartRefused, match=REFUSED):
        hooks.apply_hooks((CLASS,))


def test_a_class_that_another_plugin_replaces_after_us_stops_the_start(registry, part):
    hooks.register_hooks((CLASS,))
    registry.register("a_part.Thing", replacement(part), HookType.REPLACE)
    registry.apply_hooks()
    with pytest.raises(StartRefused, match=REFUSED):
        hooks.verify_hooks()


@pytest.mark.parametrize("is_first", [False, True])
def test_a_class_that_is_replaced_without_the_registry_stops_the_start(registry, part, is_first):
    theirs = replacement(part)
    if not is_first:
        hooks.register_hooks((CLASS,))
    part.module.Thing = theirs
    with pytest.raises(StartRefused, match=REFUSED):
        hooks.apply_hooks((CLASS,))


@pytest.mark.parametrize(("is_first", "name"), [(True, "ours(theirs(stock))"), (False, "theirs(ours(stock))")])
def test_a_method_that_another_plugin_wraps_carries_both(registry, part, is_first, name):
    def theirs(original, self):
        return f"theirs({original(self)})"

    if is_first:
        registry.register("a_part.Thing.name", theirs, HookType.AROUND)
        registry.apply_hooks()
        hooks.apply_hooks((CLASS,))
    else:
        hooks.register_hooks((CLASS,))
        registry.register("a_part.Thing.name", theirs, HookType.AROUND)
        registry.apply_hooks()
    assert part.module.Thing().name() == name
    hooks.verify_hooks()


# SGLang's own subclasses.


def test_sglangs_own_subclasses_behave_as_ours(service):
    from sglang.srt.entrypoints.openai.serving_responses import OpenAIServingResponses
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    from sglang_chunk_cache.host.chat import ChunkServingChat
    from sglang_chunk_cache.host.tokenizer_manager import ChunkTokenizerManager

    for sub, ours in ((TokenizerWorker, ChunkTokenizerManager), (OpenAIServingResponses, ChunkServingChat)):
        assert issubclass(sub, ours)
        for name in signatures.overrides(ours):
            assert getattr(sub, name) is getattr(ours, name), name
    assert signatures.check_signatures() == [], "also where everything is replaced"


def test_a_tokenizer_worker_checks_and_answers(service):
    from sglang.srt.managers.io_struct import GenerateReqInput
    from sglang.srt.managers.multi_tokenizer_mixin import TokenizerWorker

    worker = TokenizerWorker.__new__(TokenizerWorker)  # its own start needs a router
    worker.__dict__.update(service.manager.__dict__)

    async def ask(text: str) -> Any:
        return await worker.generate_request(GenerateReqInput(text=text, sampling_params={"max_new_tokens": 3}))\
            .__anext__()  # fmt: skip

    assert "chunk_cache" in service.run(ask("s<|chunk|>aa<|chunk|>q"))["meta_info"]
    with pytest.raises(ValueError, match="text: only one separator"):
        service.run(ask("s<|chunk|>aa"))


def test_responses_refuse_marks_and_serve_plain_text(service):
    service.scheduler.seen.clear()
    body = {"model": service.manager.served_model_name, "store": False}
    response = service.post("/v1/responses", {**body, "input": "s<|chunk|>aa<|chunk|>q"})
    assert response.status_code == 400
    assert "input: this route cannot mark chunks with '<|chunk|>'; use /v1/chat/completions" in response.text
    assert service.scheduler.seen == []
    response = service.post("/v1/responses", {**body, "input": "hello"})
    assert response.status_code == 200, response.text
    assert len(service.scheduler.seen) == 1
