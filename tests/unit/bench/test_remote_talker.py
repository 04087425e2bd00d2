"""``chat --url`` and ``complete --url``: pieces of a streamed answer, and what goes wrong on the way."""

import asyncio
from contextlib import aclosing

import pytest

from headrace.base.errors import EngineUnavailableError
from headrace.bench.http_client import ServerAnswerError
from headrace.cli.talk import RemoteTalker, write_answer

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def connect(fake_server):
    """Return a function that makes a talker to the small server; all are stopped at the end."""
    made = []

    def make(model="m", api_key=None):
        made.append(RemoteTalker(fake_server.url, model, api_key))
        return made[-1]

    yield make
    for talker in made:
        await talker.stop()
    await asyncio.sleep(0)  # a transport closes in the next turn of the loop


async def test_a_chat_streams_and_takes_the_servers_model(fake_server, connect):
    talker, pieces = connect(model=None), []
    await talker.start()
    text = await write_answer(talker.chat(HELLO, {"max_tokens": 3, "temperature": 0.0}), pieces.append)
    assert text == "xxx"
    assert "".join(pieces) == text
    [body] = fake_server.requests
    assert (body["model"], body["messages"], body["temperature"]) == ("fake-model", HELLO, 0.0)


async def test_a_text_is_continued(fake_server, connect):
    talker = connect(api_key="key")
    await talker.start()
    assert await write_answer(talker.complete("once", {"max_tokens": 2}), lambda piece: None) == "xx"
    assert fake_server.requests[0]["prompt"] == "once"
    assert "Authorization: Bearer key" in fake_server.headers[0]


@pytest.mark.parametrize(
    ("fault", "error", "says"),
    [
        ({"status": 404}, ServerAnswerError, "answered 404: no, because of a reason"),
        ({"stream_error": True}, ServerAnswerError, "the engine stumbled"),
        ({"break_off_after": 1}, EngineUnavailableError, "in the middle of an answer"),
    ],
)
async def test_errors_reach_the_user(fake_server, connect, fault, error, says):
    for name, value in fault.items():
        setattr(fake_server, name, value)
    talker = connect()
    with pytest.raises(error, match=says):
        await write_answer(talker.chat(HELLO, {"max_tokens": 3}), lambda piece: None)


async def test_an_answer_that_is_left_closes_its_connection(fake_server, connect):
    fake_server.gate = asyncio.Event()
    talker = connect()
    pieces = talker.chat(HELLO, {"max_tokens": 1000})
    async with aclosing(pieces):
        waiting = asyncio.create_task(anext(pieces))
        while not fake_server.running:
            await asyncio.sleep(0)
        fake_server.gate.set()
        assert await waiting == "x"
    assert await write_answer(talker.chat(HELLO, {"max_tokens": 1}), lambda piece: None) == "x"
    assert fake_server.connections == 2, "a connection with half an answer must not be used again"
