"""Bodies are taken strictly, and what is refused is named."""

import json

import pytest

from kvport.api.bodies import (
    ChatBody,
    CompletionBody,
    ExportBody,
    PrefixBody,
    ProbeBody,
    decode,
)
from kvport.api.errors import BadRequestError
from kvport.api.messages import conversation

TALK = [{"role": "user", "content": "Hi"}]
CHAT = {"model": "m", "messages": TALK}
TEXT = {"model": "m", "prompt": "Hi"}


def refusal(kind, body):
    with pytest.raises(BadRequestError) as refused:
        decode(kind, body if isinstance(body, bytes) else json.dumps(body).encode())
    for field in refused.value.fields:
        assert field.split(".")[0] in refused.value.message, "the text names it, too"
    return refused.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", "1"),
        ("n", 1.0),
        ("n", 2),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2),
        ("seed", -1),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stream", 1),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("logit_bias", {"1": 1.0}),
        ("ignore_eos", "yes"),
        ("cache.policy", "newest"),
        ("cache.artifact", "blake3:0"),
        ("cache.newest", 1),
        ("stream_options.usage", True),
        ("temprature", 0.5),
    ],
)
@pytest.mark.parametrize(("kind", "good"), [(ChatBody, CHAT), (CompletionBody, TEXT)])
def test_nonsense_is_refused_by_name(kind, good, field, value):
    name, _, inner = field.partition(".")
    body = {**good, name: {inner: value} if inner else value}
    assert refusal(kind, body).fields[0].startswith(field)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**CHAT, "messages": []}, "messages"),
        ({**CHAT, "messages": "Hi"}, "messages"),
        ({**CHAT, "tool_choice": "required"}, "tool_choice"),
        ({**CHAT, "response_format": {"type": "json_object"}}, "response_format.type"),
        ({**CHAT, "top_logprobs": 21}, "top_logprobs"),
        ({**CHAT, "logprobs": 5}, "logprobs"),
        ({**CHAT, "prompt": "Hi"}, "prompt"),
        ({"messages": TALK}, "model"),
        ({"model": "m"}, "messages"),
    ],
)
def test_nonsense_in_a_chat_is_refused_by_name(body, field):
    assert refusal(ChatBody, body).fields == (field,)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({**TEXT, "prompt": []}, "prompt"),
        ({**TEXT, "prompt": [1, "2"]}, "prompt[1]"),
        ({**TEXT, "prompt": [-1]}, "prompt[0]"),
        ({**TEXT, "prompt": [1 << 32]}, "prompt[0]"),
        ({**TEXT, "prompt": ["Hi", "Ho"]}, "prompt[0]"),
        ({**TEXT, "logprobs": True}, "logprobs"),
        ({**TEXT, "echo": True}, "echo"),
        ({**TEXT, "best_of": 3}, "best_of"),
        ({**TEXT, "suffix": "end"}, "suffix"),
    ],
)
def test_nonsense_in_a_completion_is_refused_by_name(body, field):
    assert refusal(CompletionBody, body).fields[0].startswith(field.partition("[")[0])


@pytest.mark.parametrize("kind", [PrefixBody, ProbeBody])
@pytest.mark.parametrize(
    "prompts",
    [{}, {"prompt": "Hi", "tokens": [1]}, {"prompt": "Hi", "messages": TALK}],
)
def test_a_prefix_is_given_in_exactly_one_way(kind, prompts):
    error = refusal(kind, {"model": "m", **prompts})
    assert error.fields == ("messages", "prompt", "tokens")


def test_another_scope_is_refused():
    assert refusal(PrefixBody, {**TEXT, "scope": "theirs"}).fields == ("scope",)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b'{"model": "\xff"}', b"\0"]
)
def test_what_is_no_json_object_is_refused(body):
    refusal(ChatBody, body)


def test_json_nested_without_end_is_refused():
    refusal(ChatBody, b'{"model": ' + b"[" * 100_000)


def test_a_refusal_does_not_repeat_what_was_sent():
    error = refusal(ChatBody, {**CHAT, "cache": {"policy": "my secret"}})
    assert "secret" not in error.message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("presence_penalty", 1),
        ("logit_bias", {"5": 1}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "look"}}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "x"}}),
        ("response_format", {"json_schema": {"name": "x"}, "type": "json_schema"}),
        ("functions", []),
        ("modalities", ["audio"]),
    ],
)
def test_what_would_change_the_answer_is_called_unsupported(field, value):
    error = refusal(ChatBody, {**CHAT, field: value})
    assert error.message.startswith(f'"{field}" is not supported')


def test_only_completions_have_fields_with_one_value():
    assert refusal(PrefixBody, {**TEXT, "n": 1}).message == '"n" is not supported'


@pytest.mark.parametrize(("kind", "good"), [(ChatBody, CHAT), (CompletionBody, TEXT)])
@pytest.mark.parametrize("value", [None, "high", 7, [True], {"a": {}}])
def test_fields_without_effect_are_ignored_whatever_they_hold(kind, good, value):
    names = [
        "metadata", "parallel_tool_calls", "prompt_cache_key", "reasoning_effort",
        "safety_identifier", "service_tier", "store", "user", "verbosity",
    ]  # fmt: skip
    body = {**good, **dict.fromkeys(names, value)}
    assert decode(kind, json.dumps(body).encode()).model == "m"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"model": "m"}, '"messages" is missing'),
        ({**CHAT, "max_tokens": 0}, '"max_tokens": expected `int` >= 1'),
        (
            {**CHAT, "cache": {"policy": "newest"}},
            '"cache.policy": not one of nearest, exact',
        ),
        (
            {**CHAT, "cache": {"artifact": "x"}},
            '"cache.artifact": expected an artifact\'s id: blake3: and 64 hex digits',
        ),
        ([], "the body: expected `object`, got `array`"),
    ],
)
def test_a_refusal_says_what_is_wrong_where(body, message):
    assert refusal(ChatBody, body).message == message


@pytest.mark.parametrize("least", [0, -1, 1.5, "1", True, 1 << 40])
def test_a_least_number_of_tokens_is_a_number_of_tokens(least):
    body = {"model": "m", "prompt": "Hi", "min_tokens": least}
    assert refusal(ExportBody, body).fields == ("min_tokens",)


def test_fields_that_clients_commonly_send_are_taken():
    common = {
        "user": "me", "n": 1, "frequency_penalty": 0, "presence_penalty": 0.0,
        "logit_bias": {}, "metadata": {"a": "b"}, "store": False, "seed": None,
        "service_tier": "auto", "stop": None, "stream_options": None,
        "tool_choice": "auto", "parallel_tool_calls": True,
        "response_format": {"type": "text"},
    }  # fmt: skip
    assert decode(ChatBody, json.dumps({**CHAT, **common}).encode()).messages == TALK


def test_parts_of_text_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert conversation([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "ab"}
    ]


def test_arguments_of_tool_calls_become_objects():
    function = {"name": "look", "arguments": '{"at": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    (found,) = conversation([message])
    assert found["content"] == ""
    assert found["tool_calls"][0]["function"]["arguments"] == {"at": 1}
    assert function["arguments"] == '{"at": 1}', "what was given stays as it is"


@pytest.mark.parametrize(
    "message",
    [
        {"content": "Hi"},
        {"role": 1, "content": "Hi"},
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": ["Hi"]},
        {"role": "assistant", "tool_calls": "look"},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]},
        {"role": "assistant", "tool_calls": [{"function": "look"}]},
    ],
)
def test_messages_of_another_form_are_refused(message):
    with pytest.raises(BadRequestError) as refused:
        conversation([*TALK, message])
    assert refused.value.fields == ("messages",)
    assert refused.value.message.startswith('"messages[1]": ')


def test_arguments_nested_without_end_are_a_bad_request():
    from kvport.api.errors import BadRequestError
    from kvport.api.messages import conversation

    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    with pytest.raises(BadRequestError):
        conversation([{"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_what_a_request_leaves_in_the_cache(kind):
    good = CHAT if kind is ChatBody else TEXT
    usual = decode(kind, json.dumps(good).encode()).cache
    assert (usual.read, usual.write, usual.ttl, usual.pin) == (True, True, None, None)
    given = {
        "read": False,
        "ttl": 315_360_000,
        "pin": {"owner": "the night's run ~", "seconds": 2_592_000},
    }
    cache = decode(kind, json.dumps({**good, "cache": given}).encode()).cache
    assert (cache.read, cache.write, cache.ttl) == (False, True, 315_360_000)
    assert (cache.pin.owner, cache.pin.seconds) == ("the night's run ~", 2_592_000)


@pytest.mark.parametrize(
    ("field", "cache"),
    [
        ("cache.read", {"read": 1}),
        ("cache.write", {"write": "no"}),
        ("cache.ttl", {"ttl": 0}),
        ("cache.ttl", {"ttl": 1.5}),
        ("cache.ttl", {"ttl": 315_360_001}),
        ("cache.pin.owner", {"pin": {"owner": "", "seconds": 1}}),
        ("cache.pin.owner", {"pin": {"owner": "x" * 65, "seconds": 1}}),
        ("cache.pin.owner", {"pin": {"owner": "né", "seconds": 1}}),
        ("cache.pin.owner", {"pin": {"owner": "two\nlines", "seconds": 1}}),
        ("cache.pin.owner", {"pin": {"owner": "line\n", "seconds": 1}}),
        ("cache.pin.owner", {"pin": {"seconds": 1}}),
        ("cache.pin.seconds", {"pin": {"owner": "x"}}),
        ("cache.pin.seconds", {"pin": {"owner": "x", "seconds": 0}}),
        ("cache.pin.seconds", {"pin": {"owner": "x", "seconds": 2_592_001}}),
        ("cache.pin.until", {"pin": {"owner": "x", "seconds": 1, "until": 5}}),
        ("cache.pin", {"write": False, "pin": {"owner": "x", "seconds": 1}}),
        ("cache.ttl", {"write": False, "ttl": 5}),
        ("cache.artifact", {"read": False, "artifact": "blake3:" + "0" * 64}),
        ("cache.artifact", {"artifact": "blake3:" + "0" * 64 + "\n"}),
    ],
)
def test_nonsense_about_the_cache_is_refused_by_name(field, cache):
    assert refusal(CompletionBody, {**TEXT, "cache": cache}).fields[0] == field


@pytest.mark.parametrize("name", ["read", "write", "ttl", "pin"])
def test_a_probe_takes_nothing_that_it_would_not_heed(name):
    body = {"model": "m", "prompt": "Hi", "cache": {name: None}}
    assert refusal(ProbeBody, body).fields == (f"cache.{name}",)
