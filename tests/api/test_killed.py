"""kill -9 in the middle of a reply: the prompt's state restores."""

import pytest

from kvport.api.client import Client
from tests.api.killing import kill_mid_reply
from tests.server_process import running_server


@pytest.mark.parametrize("arch", ["llama", "qwen3_5"])
def test_b61_prompt_survives_a_kill_in_mid_reply(tmp_path, model_dir, arch):
    model, home = model_dir(arch), tmp_path / "home"
    text = "Say something long about prefixes. " * 20
    length = kill_mid_reply(home, model, prompt=text)
    with running_server(home, model), Client.for_home(home) as client:
        again = client.complete(arch, prompt=text, max_tokens=3)
        assert again.prompt_tokens == length
        assert again.cached_tokens == length - 1
