"""The client against real servers: every method, and what it does when things fail."""

from pathlib import Path

PROMPT = "".join(f"{n} apples and {n + 1} pears. " for n in range(40))


def test_a_prompt_computed_here_is_answered_there_with_the_same_bits(
    origin, destination, tmp_path: Path
):
    for model in ("llama", "qwen3_5"):
        cold = origin.client.complete(model, prompt=PROMPT, logprobs=5, max_tokens=16)
        hot = origin.client.complete(model, prompt=PROMPT, logprobs=5, max_tokens=16)
        length = cold.prompt_tokens
        print(cold, hot)
        out = origin.client.export(model, tmp_path / model, prompt=PROMPT)
        print(out)
        got = destination.client.import_(tmp_path / model)
        print(got)
        there = destination.client.complete(
            model, prompt=PROMPT, logprobs=5, max_tokens=16
        )
        assert there.cached_tokens == length - 1
        assert (there.text, there.logprobs, there.top_logprobs) == (
            hot.text,
            hot.logprobs,
            hot.top_logprobs,
        )
