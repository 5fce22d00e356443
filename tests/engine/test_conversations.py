"""Turns of a conversation: templates, forks, and what the next turn restores."""

import pytest

from kvport.snapshot.engine.template import render_chat, render_text
from kvport.snapshot.errors import BadPromptError, PromptTooLargeError

SYSTEM = {"role": "system", "content": "Answer in short words. " * 12}
HYBRIDS = ["qwen3_5", "mamba2", "gemma3_text", "llama"]


def user(text):
    return {"role": "user", "content": text}


def turn(rig, messages, **options):
    rendered = render_chat(rig.engine.model("m").tokenizer, messages)
    answer = rig.complete(
        rendered.tokens, fork=rendered.fork, max_tokens=25, ignore_eos=False, **options
    )
    return rendered, answer


@pytest.mark.parametrize("arch", HYBRIDS)
def test_template_that_drops_reasoning_restores_to_the_fork(rig, model_dir, arch):
    r = rig(model_dir(arch, template="thinking"))
    messages = [SYSTEM, user("What is one and one?")]
    first, answer = turn(r, messages)
    assert first.fork < len(first.tokens) - 1, "the open reasoning is not kept"
    reply = {"role": "assistant", "content": "<think>" + answer.text + "</think>two"}
    second, later = turn(r, [*messages, reply, user("And two and two?")])
    assert second.tokens[: first.fork] == first.tokens[: first.fork]
    assert later.restored >= first.fork


@pytest.mark.parametrize("arch", HYBRIDS)
def test_template_that_keeps_replies_restores_to_the_end_of_the_reply(
    rig, model_dir, arch
):
    r = rig(model_dir(arch, template="chatml"))
    messages = [SYSTEM, user("What is one and one?")]
    first, answer = turn(r, messages)
    reply = {"role": "assistant", "content": answer.text}
    second, later = turn(r, [*messages, reply, user("And two and two?")])
    whole = first.tokens + answer.tokens
    assert second.tokens[: len(whole)] == whole
    assert later.restored == len(whole)


@pytest.mark.parametrize("template", ["chatml", "thinking"])
def test_fork_is_where_every_next_turn_still_agrees(rig, model_dir, template):
    tokenizer = rig(model_dir("llama", template=template)).engine.model("m").tokenizer
    messages = [SYSTEM, user("Hello")]
    rendered = render_chat(tokenizer, messages)
    for text in ("yes", "<think>a\nb</think>no", ""):
        reply = {"role": "assistant", "content": text}
        later = render_chat(tokenizer, [*messages, reply, user("More")]).tokens
        assert later[: rendered.fork] == rendered.tokens[: rendered.fork]
    assert len(rendered.tokens) - rendered.fork < 12


def test_prompts_without_a_future_have_no_fork(rig, model_dir):
    tokenizer = rig(model_dir("llama")).engine.model("m").tokenizer
    assert render_text(tokenizer, "plain text").fork is None
    closed = render_chat(
        tokenizer, [user("a"), {"role": "assistant", "content": "b"}], open_reply=False
    )
    assert closed.tokens


def test_messages_that_the_template_refuses_are_a_bad_prompt(rig, model_dir):
    tokenizer = rig(model_dir("llama")).engine.model("m").tokenizer
    with pytest.raises(BadPromptError):
        render_chat(tokenizer, [{"role": "user"}])


def test_texts_that_no_prefix_can_hold_are_refused_before_they_cost_memory(
    rig, model_dir
):
    tokenizer = rig(model_dir("llama")).engine.model("m").tokenizer
    text = "x" * ((4 << 20) + 1)
    with pytest.raises(PromptTooLargeError):
        render_text(tokenizer, text)
    with pytest.raises(PromptTooLargeError):
        render_chat(tokenizer, [user(text)])
