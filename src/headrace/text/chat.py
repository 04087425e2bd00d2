"""Chat templates: from messages to the prompt text.

Renders in a thread of its own, which is ended when it exceeds its time: a template that loops for ever costs one
request two seconds, and nothing else. Must not tokenize.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes

from headrace.base.errors import RequestError, TemplateError
from headrace.text.chat_limits import MAX_TEXT_CHARS, reset_spent
from headrace.text.chat_sandbox import ChatEnvironment

RENDER_LIMIT_S = 2.0
_GRACE_S = 1.0
_MAX_SOURCE_CHARS = 1 << 20
_MAX_DEPTH = 64
# The space at its end shows whether the template trims the message.
_TAG = "HEADRACE_CONTINUE_HERE "
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, *, limit_s: float = RENDER_LIMIT_S
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja source.
            special_tokens: name -> text; the template sees them as variables (``bos_token`` ...).
            limit_s: longest time of one render.

        Raises:
            TemplateError: a syntax error, or a source that is too long.
        """
        if len(source) > _MAX_SOURCE_CHARS:
            raise TemplateError(
                f"the chat template has {len(source)} characters; the limit is {_MAX_SOURCE_CHARS}",
                param="chat_template",
            )
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._limit_s = limit_s
        environment = ChatEnvironment()
        reset_spent()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has a syntax error in line {error.lineno}: {error.message}", param="chat_template"
            ) from error
        except (jinja2.TemplateError, SyntaxError, RecursionError, ValueError, OverflowError, MemoryError) as error:
            raise TemplateError(f"the chat template cannot be compiled: {error}", param="chat_template") from error
        self.takes_parts = iterates_content(tree)
        """True if the template itself goes through the parts of a message's content."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """Return the prompt text of a conversation.

        Args:
            messages: role and content each; content is a text or a list of ``{"type": "text", "text": ...}`` parts.
            add_generation_prompt: end with the beginning of an assistant message.
            continue_final_message: leave the last message open, so that the model continues it. Not together with
                ``add_generation_prompt``.
            tools: JSON schemas of functions.
            kwargs: further variables for the template.

        Raises:
            RequestError: no messages, a content that is not text, or options that exclude each other.
            TemplateError: the template raised, ran too long or made too much.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message needs add_generation_prompt=false: the prompt can end inside the last message "
                "or begin a new one, not both",
                param="continue_final_message",
            )
        if not messages:
            raise RequestError("messages must not be empty", param="messages")
        chat = [self._message(message) for message in messages]
        if continue_final_message:
            last = _last_text(chat)
            _set_last_text(chat, last + _TAG)
        variables: dict[str, Any] = {
            **self._special_tokens,
            **_plain(kwargs),
            "messages": chat,
            "tools": _plain(list(tools)) if tools is not None else None,
            "documents": _plain(kwargs.get("documents")),
            "add_generation_prompt": add_generation_prompt,
        }
        text = _run_limited(lambda: _render(self._template, variables), self._limit_s)
        return _cut_at_tag(text, last) if continue_final_message else text

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        # A key without a value counts as absent: clients send content=None beside tool calls.
        plain: dict[str, Any] = {str(key): _plain(value) for key, value in message.items() if value is not None}
        reasoning = next((plain[key] for key in _REASONING_KEYS if key in plain), None)
        if reasoning is not None:
            plain = {"thinking": reasoning, **plain, "reasoning_content": reasoning}
        content = plain.get("content")
        if isinstance(content, list) and not self.takes_parts:
            plain["content"] = "\n".join(_part_text(part) for part in content)
        elif isinstance(content, list):
            for part in content:
                _part_text(part)
        return plain


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if (
        isinstance(part, dict)
        and part.get("type", "text") in ("text", "input_text", "output_text")
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(f"content part of type {kind!r} is not supported; only text parts are", param="messages")


def _last_text(chat: list[dict[str, Any]]) -> str:
    content = chat[-1].get("content")
    if isinstance(content, list):
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        content = texts[-1] if texts else None
    if not isinstance(content, str):
        raise RequestError(
            "continue_final_message: the last message has no text to continue", param="continue_final_message"
        )
    return content


def _set_last_text(chat: list[dict[str, Any]], text: str) -> None:
    content = chat[-1]["content"]
    if isinstance(content, list):
        [part for part in content if isinstance(part, dict) and "text" in part][-1]["text"] = text
    else:
        chat[-1]["content"] = text


def _cut_at_tag(text: str, last: str) -> str:
    """Return the text up to the end of the last message, which the tag marks."""
    at = text.rfind(_TAG.strip())
    if at < 0 or last.strip() not in text:
        raise TemplateError(
            "continue_final_message: the last message is not in the rendered chat; the template changes or drops it",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


def _plain(value: Any, depth: int = 0) -> Any:
    """Copy a value down to plain JSON types, so that a template never meets an object with methods of ours."""
    if depth > _MAX_DEPTH:
        raise RequestError(f"the request nests values more than {_MAX_DEPTH} deep", param="messages")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    raise RequestError(f"a value of type {type(value).__name__} cannot be given to a chat template", param="messages")


def iterates_content(tree: nodes.Template) -> bool:
    """Return True if a template loops over the content of a message, or over a variable set from it."""
    names: set[str] = set()
    for assign in tree.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node, names: set[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, names)
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names


def _render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render piece by piece and stop at the limit of the output.

    Raises:
        TemplateError: for anything that the template does wrong.
    """
    pieces: list[str] = []
    size = 0
    try:
        for piece in _pieces(template, variables):
            size += len(piece)
            if size > MAX_TEXT_CHARS:
                raise TemplateError(f"the chat template makes more than {MAX_TEXT_CHARS} characters", param="messages")
            pieces.append(piece)
    except TemplateError:
        raise
    except jinja2.exceptions.SecurityError as error:
        raise TemplateError(f"the chat template does what is not allowed: {error}", param="messages") from error
    except Exception as error:
        what = f"{type(error).__name__}: " if not isinstance(error, jinja2.TemplateError) else ""
        raise TemplateError(f"the chat template failed: {what}{error}", param="messages") from error
    return "".join(pieces)


def _pieces(template: jinja2.Template, variables: Mapping[str, Any]) -> Iterator[str]:
    return template.root_render_func(template.new_context(dict(variables)))


class _TimeOver(BaseException):
    """Raised inside the rendering thread from outside; not an Exception, so that no template code swallows it."""


class _Job:
    """Result of one render, and the lock that orders its end and the order to stop."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.done = False
        self.text = ""
        self.error: Exception | None = None


def _run_limited(render: Any, limit_s: float) -> str:
    """Run ``render`` in a thread and end it after ``limit_s`` seconds.

    The thread is ended by an exception that the interpreter raises in it between two bytecodes. No operation of the
    sandbox stays long in C code, because the sizes are bounded.

    Raises:
        TemplateError: from the render, or because the time is over.
    """
    job = _Job()
    thread = threading.Thread(target=_work, args=(render, job), name="chat-template", daemon=True)
    thread.start()
    thread.join(limit_s)
    over = time.monotonic() + _GRACE_S
    expired = thread.is_alive()
    while thread.is_alive() and time.monotonic() < over:
        # With a timeout: the exception may have hit the thread while it held the lock.
        if job.lock.acquire(timeout=0.05):
            if not job.done and thread.ident is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeOver))
            job.lock.release()
        thread.join(0.05)
    if expired and not job.done:
        raise TemplateError(f"the chat template took longer than {limit_s:g} s", param="messages")
    if job.error is not None:
        raise job.error
    return job.text


def _work(render: Any, job: _Job) -> None:
    try:
        reset_spent()
        try:
            text, error = render(), None
        except Exception as caught:
            text, error = "", caught
        with job.lock:
            job.text, job.error, job.done = text, error, True
        for _ in range(2):  # a backward jump: an exception that was ordered before the lock was taken arrives here
            pass
    except _TimeOver:
        return
