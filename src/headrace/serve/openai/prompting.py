"""From messages to a prompt, through the chat template; shared by chat and ``/tokenize``.

Must not tokenize and must not know the shape of answers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from headrace.base.errors import RequestError
from headrace.serve.context import ServeState
from headrace.serve.openai.chat_schema import ChatMessage, TemplateFields

if TYPE_CHECKING:
    from headrace.text.chat import ChatTemplate


async def render_prompt(state: ServeState, body: TemplateFields, messages: list[ChatMessage]) -> str:
    """Render the messages of a request.

    Raises:
        RequestError: no template, contradicting options, or a last message that cannot be continued.
        TemplateError: from the template.
    """
    carry_on = bool(body.continue_final_message)
    add_generation_prompt = not carry_on if body.add_generation_prompt is None else body.add_generation_prompt
    if carry_on and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them",
            param="continue_final_message",
        )
    if carry_on and messages[-1].role != "assistant":
        raise RequestError(
            f"continue_final_message needs a last message of role 'assistant', got '{messages[-1].role}'",
            param="continue_final_message",
        )
    plain = [message.to_template(index) for index, message in enumerate(messages)]
    variables = _variables(body)

    def render() -> str:
        return _template(state, body).render(
            plain, add_generation_prompt=add_generation_prompt, continue_final_message=carry_on, **variables
        )

    # In a thread, because a template may be slow and the event loop serves everybody. Templates that requests bring
    # have few threads of their own, so that slow ones hold up only each other.
    threads = None if body.chat_template is None else state.guest_threads
    return await asyncio.get_running_loop().run_in_executor(threads, render)


_OWN_NAMES = frozenset({"messages", "add_generation_prompt", "continue_final_message", "tools"})


def _variables(body: TemplateFields) -> dict[str, Any]:
    variables = body.chat_template_kwargs or {}
    for name in variables:
        if name in _OWN_NAMES or not name.isidentifier():
            raise RequestError(
                f"chat_template_kwargs: '{name[:60]}' cannot be set here; use the field of the request",
                param="chat_template_kwargs",
            )
    return variables


def _template(state: ServeState, body: TemplateFields) -> ChatTemplate:
    template = state.engine.chat_template
    if body.chat_template is not None:
        return state.engine.compile_chat_template(body.chat_template)
    if template is None:
        raise RequestError(
            "the model has no chat template; send chat_template, start the server with --chat-template FILE, "
            "or use /v1/completions",
            param="chat_template",
        )
    return template
