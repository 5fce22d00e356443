"""A client that does not read does not make the server generate without end."""

import asyncio

import pytest

from kvport.api import replies
from kvport.api.errors import StalledError
from kvport.api.replies import Reply
from kvport.snapshot.engine.requests import Request


async def read_late(node, tokens):
    request = Request(tokens=[1, 2, 3], max_tokens=tokens, ignore_eos=True)
    reply = Reply(node, "llama", request)
    await reply.restored()
    for _ in range(tokens):  # nobody reads meanwhile
        await asyncio.sleep(0.01)
        if reply._overrun:
            break
    return [token.token async for token in reply.tokens()]


def test_an_unread_reply_is_ended(origin, monkeypatch):
    monkeypatch.setattr(replies, "_UNREAD", 50)
    with pytest.raises(StalledError):
        asyncio.run(read_late(origin.node, 5000))
    assert len(origin.client.complete("llama", prompt="on", max_tokens=3).tokens) == 3
