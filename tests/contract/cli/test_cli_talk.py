"""``chat`` and ``complete``: where the question comes from, where the answer goes, the commands of a conversation."""

import io
import sys

import pytest

from headrace.base.errors import ContextLengthError, EngineUnavailableError
from headrace.cli import chat, complete


class FakeTalker:
    """Answers with what it was asked; remembers everything."""

    def __init__(self):
        self.asked, self.sampling, self.stopped, self.fault = [], [], 0, None

    async def start(self):
        if self.fault == "start":
            raise EngineUnavailableError("no model")

    async def chat(self, messages, sampling):
        self.asked.append([dict(message) for message in messages])
        self.sampling.append(sampling)
        yield "you said "
        if self.fault is not None:
            raise self.fault
        yield messages[-1]["content"]

    async def complete(self, text, sampling):
        self.asked.append(text)
        self.sampling.append(sampling)
        yield " and so"
        yield " on"

    async def stop(self):
        self.stopped += 1


class Terminal(io.StringIO):
    """Standard input that says it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def talker(monkeypatch):
    fake = FakeTalker()
    monkeypatch.setattr(chat, "make_talker", lambda flags: fake)
    monkeypatch.setattr(complete, "make_talker", lambda flags: fake)
    monkeypatch.setattr(sys, "stdin", Terminal())
    return fake


def test_one_question(headrace, talker):
    ran = headrace("chat", "what?", "--system", "be brief", "--temperature", "0", "--stop", "a", "--sampling-seed", "5")
    assert (ran.code, ran.out, ran.err) == (0, "you said what?\n", "")
    assert talker.asked == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": "what?"}]]
    assert talker.sampling == [{"temperature": 0.0, "stop": ["a"], "seed": 5}]
    assert talker.stopped == 1


@pytest.mark.parametrize("arguments", [[], ["-"]])
def test_the_question_from_a_pipe(headrace, talker, monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert headrace("chat", *arguments).out == "you said from a pipe\n"


def test_an_empty_pipe_is_wrong_usage(headrace, talker, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert headrace("chat").code == 2
    assert headrace("complete").code == 2


def test_complete(headrace, talker):
    ran = headrace("complete", "once")
    assert (ran.code, ran.out) == (0, " and so on\n")
    assert talker.sampling == [{"max_tokens": complete.DEFAULT_MAX_TOKENS}]
    headrace("complete", "once", "--max-tokens", "7")
    assert talker.sampling[1] == {"max_tokens": 7}


def test_complete_in_a_terminal_needs_a_text(headrace, talker):
    assert headrace("complete").code == 2


def test_the_engine_is_stopped_when_it_fails(headrace, talker):
    talker.fault = ContextLengthError("too long")
    ran = headrace("chat", "what?")
    assert (ran.code, talker.stopped) == (2, 1)
    assert ran.err == "headrace: error: too long\n"
    talker.fault = "start"
    assert headrace("chat", "what?").code == 1
    assert talker.stopped == 2


def converse(headrace, monkeypatch, *lines):
    """Run a conversation; a line may be an exception class."""
    waiting = list(lines)

    def answer(prompt):
        line = waiting.pop(0) if waiting else EOFError
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr("builtins.input", answer)
    return headrace("chat")


def test_a_conversation_remembers(headrace, talker, monkeypatch):
    ran = converse(headrace, monkeypatch, "one", "", "two", "/quit", "three")
    assert ran.code == 0
    assert ran.out == "you said one\nyou said two\n"
    assert talker.asked[1] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "you said one"},
        {"role": "user", "content": "two"},
    ]
    assert talker.stopped == 1


def test_reset_system_help_and_unknown_commands(headrace, talker, monkeypatch):
    ran = converse(headrace, monkeypatch, "one", "/reset", "two", "/system be brief", "three", "/help", "/what")
    assert ran.code == 0
    assert talker.asked[1] == [{"role": "user", "content": "two"}]
    assert talker.asked[2] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}]
    assert "forget the conversation" in ran.err
    assert "unknown command /what" in ran.err


def test_an_interrupt_at_the_prompt_leaves_with_130(headrace, talker, monkeypatch):
    assert converse(headrace, monkeypatch, "one", KeyboardInterrupt).code == 130
    assert talker.stopped == 1


@pytest.mark.parametrize("fault", [ContextLengthError("too long"), KeyboardInterrupt()])
def test_a_failed_or_stopped_answer_is_not_remembered(headrace, talker, monkeypatch, fault):
    talker.fault = fault
    asked = []

    def answer(prompt):
        asked.append(prompt)
        if len(asked) == 2:
            talker.fault = None
        return ["one", "two", "/quit"][len(asked) - 1]

    monkeypatch.setattr("builtins.input", answer)
    ran = headrace("chat")
    assert ran.code == 0
    assert talker.asked[1] == [{"role": "user", "content": "two"}]
    assert ("too long" in ran.err) or ("stopped" in ran.err)


def test_a_broken_engine_ends_the_conversation(headrace, talker, monkeypatch):
    from headrace.base.errors import InvariantError

    talker.fault = InvariantError("broken")
    ran = converse(headrace, monkeypatch, "one", "two")
    assert ran.code == 1
    assert len(talker.asked) == 1
