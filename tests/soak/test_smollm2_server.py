"""A real model through the whole of it: answer, kill, restart, export, import."""

import pytest

from kvport.api.client import Client
from kvport.manifest.trust import TrustEntry
from kvport.snapshot.engine.smollm2 import fetch_smollm2
from kvport.snapshot.keyring import Keyring
from tests.api.killing import kill_mid_reply
from tests.server_process import running_server

LORE = (
    "The harbour town of Velm lies between two rivers. Its lighthouse was built in "
    "1874 by the engineer Ada Morland, after a storm had sunk eleven fishing boats. "
    "It is forty metres tall and painted in red and white. The keeper's cat is called "
    "Biscuit. Every spring the town holds a fair with boat races, and the winner gets "
    "a silver compass. The baker sells rye bread on Mondays and apple cake on Fridays. "
)
QUESTION = "Read the notes again: who built the lighthouse of Velm? Answer in one line."


@pytest.mark.soak
def test_smollm2_from_answer_to_import(tmp_path):
    model = tmp_path / "smollm2"
    fetch_smollm2(model)
    talk = [{"role": "user", "content": LORE * 5 + QUESTION}]
    home, other = tmp_path / "a", tmp_path / "b"
    options = {"messages": talk, "max_tokens": 24, "temperature": 0}

    with running_server(home, model), Client.for_home(home) as client:
        first = client.complete("smollm2", **options)
        assert first.prompt_tokens >= 512
        assert "Ada Morland" in first.text

    talk[0]["content"] += " Then name the cat."
    length = kill_mid_reply(home, model, messages=talk)
    file = tmp_path / "talk.kvport"
    with running_server(home, model), Client.for_home(home) as client:
        again = client.complete("smollm2", **options)
        assert again.cached_tokens == length - 1
        exported = client.export("smollm2", file, messages=talk)
        assert exported.restorable_tokens >= length - 1

    keyring = Keyring(other)
    keyring.create()
    public = Keyring(home).signing_key().public
    keyring.add(TrustEntry(public_key=public, name="a"))
    with running_server(other, model), Client.for_home(other) as client:
        client.import_(file)
        imported = client.complete("smollm2", **options)
        assert imported.cached_tokens == length - 1
        assert imported.text == again.text
        assert imported.tokens == again.tokens
