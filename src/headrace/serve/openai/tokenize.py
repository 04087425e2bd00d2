"""``POST /tokenize`` and ``POST /detokenize``. Must not run the model."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from pydantic import BaseModel, Field
from starlette.responses import Response

from headrace.base.errors import NotImplementedFeatureError, RequestError
from headrace.serve.context import ServeState, state_of
from headrace.serve.generation import json_answer
from headrace.serve.limits import body_of
from headrace.serve.openai.chat_schema import Messages, TemplateFields
from headrace.serve.openai.documented import documents
from headrace.serve.openai.prompting import render_prompt
from headrace.serve.openai.schema_common import RequestModel, TokenIds
from headrace.serve.openai.tokens import encode

router = APIRouter(tags=["Tokens"])


class TokenizeRequest(TemplateFields):
    """Body of ``POST /tokenize``: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="Default: true for a prompt, false for messages.")
    return_token_strs: bool | None = None
    tools: Any = None


class TokenizeAnswer(BaseModel):
    """Answer of ``POST /tokenize``."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestModel):
    """Body of ``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds


class DetokenizeAnswer(BaseModel):
    """Answer of ``POST /detokenize``."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeAnswer, **documents(TokenizeRequest))
async def tokenize(
    body: Annotated[TokenizeRequest, Depends(body_of(TokenizeRequest))],
    state: Annotated[ServeState, Depends(state_of)],
) -> Response:
    """Turn a prompt or messages into token ids."""
    state.require_ready()
    state.require_model(body.model)
    if body.tools:
        raise NotImplementedFeatureError("'tools' (tool calling) is not implemented in Headrace", param="tools")
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("exactly one of 'prompt' and 'messages' is required", param="prompt")
    if body.messages is not None:
        text = await render_prompt(state, body, body.messages)
        ids = await encode(state, text, bool(body.add_special_tokens))
    else:
        ids = await encode(state, body.prompt or "", body.add_special_tokens is not False)
    tokenizer = state.engine.tokenizer
    strings = [tokenizer.token_text(token_id) for token_id in ids] if body.return_token_strs else None
    return json_answer(
        {"count": len(ids), "max_model_len": state.engine.max_model_len, "tokens": ids, "token_strs": strings}
    )


@router.post("/detokenize", response_model=DetokenizeAnswer, **documents(DetokenizeRequest))
async def detokenize(
    body: Annotated[DetokenizeRequest, Depends(body_of(DetokenizeRequest))],
    state: Annotated[ServeState, Depends(state_of)],
) -> Response:
    """Turn token ids into text, special tokens included."""
    state.require_ready()
    state.require_model(body.model)
    tokenizer = state.engine.tokenizer
    for number, token_id in enumerate(body.tokens):
        if token_id >= tokenizer.vocab_tokens:
            raise RequestError(
                f"tokens[{number}]={token_id} is not a token; the vocabulary has {tokenizer.vocab_tokens}",
                param="tokens",
            )
    return json_answer({"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)})
