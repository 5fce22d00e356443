import pytest
from mlx_lm import generate
from mlx_lm.utils import load

from kvport.snapshot.engine.smollm2 import fetch_smollm2


@pytest.mark.soak
def test_the_fetched_model_knows_the_capital_of_france(tmp_path):
    steps = []
    fetch_smollm2(tmp_path / "smollm2", progress=steps.append)
    assert len(steps) == 3

    model, tokenizer = load(str(tmp_path / "smollm2"))
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    text = generate(model, tokenizer, prompt, max_tokens=16)
    assert text.startswith("The capital of France is Paris.")
