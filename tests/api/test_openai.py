"""Completions as clients of OpenAI's API send and read them."""

import json
import math
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pytest

from kvport.api.openai_forms import ChatForm, TextForm, Usage
from kvport.api.problems import ProblemError
from kvport.snapshot.engine.requests import Generated, Logprob
from kvport.snapshot.engine.tuning import Tuning
from tests.api.conftest import running

PROMPT = "".join(f"{n} apples, {n + 1} pears. " for n in range(12))
TALK = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": PROMPT},
]
MODELS = ["llama", "qwen3_5"]


@pytest.fixture
def http(origin):
    with origin.http() as http:
        yield http


def chat(http, **options):
    body = {"model": "llama", "messages": TALK, "max_tokens": 8, **options}
    return http.post("/v1/chat/completions", json=body)


def text(http, **options):
    body = {"model": "llama", "prompt": PROMPT, "max_tokens": 8, **options}
    return http.post("/v1/completions", json=body)


def events(answer: httpx.Response) -> list[dict]:
    lines = [line for line in answer.text.split("\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines]


def test_models_are_listed(http):
    listed = http.get("/v1/models").json()["data"]
    assert {model["id"] for model in listed} == set(MODELS)
    usual = {"enabled": True, "refusal": None, "state": "on"}
    assert all(model["cache"] == usual for model in listed)


@pytest.mark.parametrize("model", MODELS)
def test_a_chat_is_answered_and_hits_the_second_time(http, model):
    messages = [{"role": "user", "content": f"{model}, twice: {PROMPT}"}]
    first = chat(http, model=model, messages=messages).json()
    second = chat(http, model=model, messages=messages).json()

    assert first["object"] == "chat.completion"
    (choice,) = first["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] in {"length", "stop"}
    assert choice["logprobs"] is None
    usage = first["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < 20, "the template at most"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    assert second["choices"] == first["choices"]
    restored = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert restored == usage["prompt_tokens"] - 1


def test_a_text_is_continued(http):
    answer = text(http).json()
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"]
    assert len(answer["choices"][0]["token_ids"]) == 8


def test_token_ids_and_their_text_are_the_same_prompt(http, origin):
    tokens = list(origin.node.engine.model("llama").tokenizer.encode(PROMPT))
    by_text, by_tokens = text(http).json(), text(http, prompt=tokens).json()
    assert by_text["choices"] == by_tokens["choices"]


@pytest.mark.parametrize("request_it", [chat, text])
def test_a_streamed_answer_is_the_whole_one_in_pieces(http, request_it):
    whole = request_it(http).json()
    streamed = request_it(http, stream=True, stream_options={"include_usage": True})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *chunks, last = events(streamed)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]

    pieces = [chunk["choices"][0] for chunk in chunks]
    if request_it is chat:
        assert pieces[0]["delta"] == {"role": "assistant", "content": ""}
        said = "".join(piece["delta"]["content"] for piece in pieces)
        assert said == whole["choices"][0]["message"]["content"]
    else:
        said = "".join(piece["text"] for piece in pieces)
        assert said == whole["choices"][0]["text"]
    assert [t for piece in pieces for t in piece["token_ids"]] == whole["choices"][0][
        "token_ids"
    ]
    reasons = [piece["finish_reason"] for piece in pieces]
    assert reasons == [None] * (len(pieces) - 1) + [
        whole["choices"][0]["finish_reason"]
    ]
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_usage_is_streamed_only_where_asked_for(http):
    assert all(chunk["choices"] for chunk in events(text(http, stream=True)))


def test_logprobs_of_a_chat_are_exact_float32(http):
    answer = chat(http, logprobs=True, top_logprobs=3).json()
    entries = answer["choices"][0]["logprobs"]["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    for entry in entries:
        assert float(np.float32(entry["logprob"])) == entry["logprob"] < 0
        assert bytes(entry["bytes"]).decode() == entry["token"]
        top = entry["top_logprobs"]
        assert len(top) == 3
        assert top[0]["logprob"] == entry["logprob"], "greedy takes the likeliest"
        assert sorted((t["logprob"] for t in top), reverse=True) == [
            t["logprob"] for t in top
        ]


def test_logprobs_of_a_text_have_the_older_form(http):
    answer = text(http, logprobs=2).json()["choices"][0]
    found = answer["logprobs"]
    assert "".join(found["tokens"]) == answer["text"]
    for token, logprob, top in zip(
        found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True
    ):
        assert len(top) == 2
        assert top[token] == logprob == max(top.values())
    starts = found["text_offset"]
    ends = [*starts[1:], len(answer["text"])]
    assert [
        answer["text"][start:end] for start, end in zip(starts, ends, strict=True)
    ] == found["tokens"]


def test_streamed_offsets_go_on_from_piece_to_piece(http):
    whole = text(http, logprobs=0).json()["choices"][0]["logprobs"]["text_offset"]
    pieces = events(text(http, logprobs=0, stream=True))
    offsets = [piece["choices"][0]["logprobs"]["text_offset"] for piece in pieces]
    assert [offset for one in offsets for offset in one] == whole
    assert len(whole) == 8
    assert len(set(whole)) > 1


@pytest.mark.parametrize("form", [ChatForm, TextForm])
def test_a_token_that_cannot_come_has_a_log_probability_that_json_can_hold(form):
    never = Logprob(6, -math.inf)
    token = Generated(
        token=5, text="x", logprob=-math.inf, top=(never,), full=None, finish="stop"
    )
    made = form(model="m", decode=str, with_logprobs=True)
    usage = Usage(prompt=1, generated=1, restored=0)
    found = json.dumps(made.whole([token], usage)["choices"][0]["logprobs"])
    assert found.count("-9999.0") == 2
    assert "Infinity" not in found


def test_a_failure_in_a_stream_is_the_same_problem_as_elsewhere(tmp_path, model_dir):
    with (
        running(tmp_path / "home", model_dir("llama")) as server,
        server.http() as http,
    ):
        body = {"model": "llama", "prompt": "on", "ignore_eos": True}
        endless = {**body, "max_tokens": 1 << 19, "stream": True}
        with http.stream("POST", "/v1/completions", json=endless) as answer:
            lines = answer.iter_lines()
            next(lines)
            server.node.engine.close()
            *_, event, data, _ = lines
        refused = text(http)
    assert event == "event: error"
    assert json.loads(data.removeprefix("data: ")) == refused.json()
    assert refused.json()["error"]["code"] == "shutting_down"


def test_top_logprobs_without_logprobs_are_refused(http):
    answer = chat(http, top_logprobs=2)
    assert answer.status_code == 400
    assert answer.json()["fields"] == ["top_logprobs", "logprobs"]


def test_a_stop_text_ends_the_reply_and_is_not_part_of_it(http):
    whole = text(http).json()["choices"][0]["text"]
    stopped = text(http, stop=["never met", whole[3:5]]).json()["choices"][0]
    assert stopped["text"] == whole[: whole.index(whole[3:5])]
    assert stopped["finish_reason"] == "stop"


def test_a_seed_makes_sampling_repeatable(http):
    def sampled(seed):
        options = {"temperature": 1.5, "seed": seed, "top_p": 0.95, "top_k": 50}
        return text(http, max_tokens=24, **options).json()["choices"][0]["token_ids"]

    assert sampled(1) == sampled(1)
    assert sampled(1) != sampled(2)


def test_greedy_is_the_default(http):
    assert text(http).json()["choices"] == text(http, temperature=0).json()["choices"]


def test_max_completion_tokens_counts_for_chats(http):
    answer = chat(http, max_tokens=None, max_completion_tokens=3, ignore_eos=True)
    assert answer.json()["usage"]["completion_tokens"] == 3


def test_tools_and_template_options_reach_the_template(http):
    tools = [{"type": "function", "function": {"name": "look"}}]
    plain, with_tools = chat(http).json(), chat(http, tools=tools).json()
    assert with_tools["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "add_generation_prompt"])
def test_arguments_of_the_tokenizer_are_no_template_options(http, name):
    answer = chat(http, chat_template_kwargs={name: False})
    assert answer.status_code == 400
    assert answer.json()["fields"] == ["chat_template_kwargs"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "status", "code"),
    [
        ({"model": "none"}, 404, "unknown_model"),
        ({"prompt": [100_000]}, 400, "bad_prompt"),
        ({"prompt": ""}, 400, "bad_prompt"),
        ({"n": 2}, 400, "bad_request"),
        ({"cache": {"artifact": f"blake3:{'0' * 64}"}}, 404, "artifact_unknown"),
    ],
)
def test_a_refused_request_has_a_status_streamed_or_not(
    http, stream, options, status, code
):
    answer = text(http, stream=stream, **options)
    assert answer.headers["content-type"] == "application/problem+json"
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_content_without_text_is_empty_text(http):
    nothing = chat(http, messages=[{"role": "user", "content": None}])
    no_parts = chat(http, messages=[{"role": "user", "content": []}])
    assert nothing.json()["choices"] == no_parts.json()["choices"]


def test_exact_policy_restores_only_chunk_multiples(http):
    prompt = f"exactly: {PROMPT * 2}"
    text(http, prompt=prompt, cache={"policy": "exact"})
    usage = text(http, prompt=prompt, cache={"policy": "exact"}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 256


def test_a_client_that_leaves_ends_its_request(origin, http):
    """An exact request runs alone: it begins only when the endless one has ended."""
    endless = {"model": "llama", "prompt": "on and on", "ignore_eos": True}
    body = {**endless, "max_tokens": 1 << 19, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert next(answer.iter_bytes()).startswith(b"data: ")
    assert text(http, cache={"policy": "exact"}).status_code == 200


def test_a_client_that_leaves_without_reading_ends_its_request(origin, http):
    body = {"model": "llama", "prompt": "on and on", "ignore_eos": True}
    with (
        origin.http() as leaving,
        pytest.raises(httpx.ReadTimeout),
    ):
        leaving.post(
            "/v1/completions", json={**body, "max_tokens": 1 << 19}, timeout=0.3
        )
    assert text(http, cache={"policy": "exact"}).status_code == 200


def test_requests_at_once_are_answered_as_alone(origin):
    prompts = [f"prompt {n}: {PROMPT}" for n in range(6)]

    def answer(prompt):
        done = origin.client.complete("llama", prompt=prompt, max_tokens=24)
        return done.tokens

    alone = [answer(prompt) for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(answer, prompts)) == alone


def test_an_engine_that_stops_ends_streams_with_a_problem(tmp_path, model_dir):
    with running(tmp_path / "home", model_dir("llama")) as server:
        stream = server.client.stream(
            "llama", prompt="on", max_tokens=1 << 19, ignore_eos=True
        )
        next(stream)
        server.node.engine.close()
        with pytest.raises(ProblemError) as ended:
            list(stream)
    assert ended.value.code == "shutting_down"


def test_too_many_waiting_requests_are_told_to_come_back(tmp_path, model_dir):

    tuning = Tuning(chunk=256, stride=256, queue=0)
    with (
        running(tmp_path / "home", model_dir("llama"), tuning=tuning) as server,
        server.http() as http,
    ):
        answer = text(http)
    assert (answer.status_code, answer.json()["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize("chat", [True, False])
def test_a_request_may_leave_nothing_behind_and_restore_nothing(origin, chat):
    text = f"what is not to be kept, {'as talk' if chat else 'as text'}. " * 20
    talk = [{"role": "user", "content": text}]
    prompt = {"messages": talk} if chat else {"prompt": text}

    def ask(**options) -> tuple[int, tuple[int, ...]]:
        found = origin.client.complete("qwen3_5", max_tokens=4, **prompt, **options)
        return found.cached_tokens, found.tokens

    first = ask(write=False)
    assert ask(write=False) == first
    assert first[0] == 0
    assert ask() == first
    restored, tokens = ask()
    assert restored > 0
    assert ask(read=False) == first
    assert tokens == first[1]


def test_a_pin_where_nothing_is_stored_is_refused(tmp_path, models):
    with running(tmp_path / "home", models[0], cache_enabled=False) as server:
        pin = {"owner": "x", "seconds": 60}
        with pytest.raises(ProblemError) as refused:
            server.client.complete("llama", prompt="Hi", pin=pin)
        assert (refused.value.status, refused.value.code) == (409, "cache_off")
