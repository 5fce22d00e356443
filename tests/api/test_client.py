"""The client's own reading of streams."""

import pytest

from kvport.api.client import Client, _lines


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_only_line_feeds_end_the_lines_of_a_stream(size):
    data = 'data: {"a":"x\u2028y\x85z\x0b"}\n\ndata: [DONE]\n\n'.encode()
    pieces = (data[i : i + size] for i in range(0, len(data), size))
    assert list(_lines(pieces)) == [*data.split(b"\n")[:-1]]


def test_models_are_typed(origin):
    names = {model.name: model for model in origin.client.models()}
    assert set(names) == {"llama", "qwen3_5"}
    assert names["llama"].cached


@pytest.mark.parametrize("how", ["messages", "prompt", "tokens"])
def test_a_completion_is_all_of_its_stream(origin, how):
    given = {
        "messages": [{"role": "user", "content": "What are pears?"}],
        "prompt": "What are pears?",
        "tokens": [5, 6, 7, 8],
    }
    options = {how: given[how], "max_tokens": 6, "logprobs": 2, "ignore_eos": True}
    whole = origin.client.complete("llama", **options)
    *deltas, last = origin.client.stream("llama", **options)
    assert whole.text == "".join(delta.text for delta in deltas)
    assert len(whole.tokens) == len(whole.logprobs) == len(whole.top_logprobs) == 6
    assert all(top[0].logprob == own for top, own in zip(
        whole.top_logprobs, whole.logprobs, strict=True
    ))  # fmt: skip
    assert last.usage is not None
    assert last.usage.prompt_tokens == whole.prompt_tokens
    assert whole.finish_reason == "length"
    assert 0 < whole.ttft_s <= whole.total_s


def test_a_client_without_a_key_is_answered_health_only(origin):
    from kvport.api.problems import ProblemError

    with Client(origin.url + "/", None) as client:
        assert client.health().status == "ok"
        with pytest.raises(ProblemError) as refused:
            client.models()
    assert (refused.value.code, refused.value.status) == ("unauthorized", 401)
    assert "api.key" in refused.value.advice
