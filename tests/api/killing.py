"""Kill a server in the middle of a reply, and show that the prompt's state is there."""

from pathlib import Path

from kvport.api.client import Client
from tests.server_process import running_server


def kill_mid_reply(home: Path, model: Path, **prompt) -> int:
    """Start a reply, `kill -9` after some tokens; answers the prompt's length."""
    with running_server(home, model) as process:
        with Client.for_home(home) as client:
            length = client.probe(model.name, **prompt).prompt_tokens
            reply = client.stream(model.name, max_tokens=400, ignore_eos=True, **prompt)
            seen = 0
            for delta in reply:
                seen += len(delta.tokens)
                if seen >= 3:
                    # A lookup answers once what was captured before is durable.
                    found = client.probe(model.name, **prompt)
                    assert found.restorable_tokens == length - 1
                    process.kill()
                    break
            reply.close()
        process.wait(30)
    return length
