"""The text side of a model: tokenizer, chat template, sampling defaults, end-of-sequence tokens. No torch.

Loaded by the front end while the core process loads the weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.base.errors import RequestError

if TYPE_CHECKING:
    from headrace.config import ModelConfig
    from headrace.text.chat import ChatTemplate
    from headrace.text.tokenizer import Tokenizer
    from headrace.weights.source import ModelFiles


@dataclass(frozen=True)
class TextParts:
    """What the front end needs of a model.

    Attributes:
        files: where the model lies.
        tokenizer: None for a model without one (a bare config.json); then only token ids are taken.
        chat_template: None if the model has none.
        defaults: sampling defaults of the model by field name of `SamplingParams`.
        eos_token_ids: tokens that end an output.
    """

    files: ModelFiles
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    defaults: dict[str, Any]
    eos_token_ids: frozenset[int]

    def compile_chat_template(self, source: str) -> ChatTemplate:
        """Return a template that a request brings along.

        Raises:
            TemplateError: it does not compile.
            RequestError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise RequestError("a chat needs a tokenizer, and this model has none; send token ids", param="messages")
        return _template(source, self.tokenizer)

    def require_chat_template(self) -> ChatTemplate:
        """Return the model's chat template.

        Raises:
            RequestError: it has none.
        """
        if self.chat_template is None:
            raise RequestError(
                "the model has no chat template; name a file with --chat-template, or send a plain prompt",
                param="messages",
            )
        return self.chat_template


def load_text_parts(config: ModelConfig) -> TextParts:
    """Find the model and load its text side.

    Raises:
        ConfigError: the model or a part of it cannot be read.
    """
    from headrace.text.generation_defaults import sampling_defaults
    from headrace.text.tokenizer import load_tokenizer
    from headrace.weights.source import resolve_model

    files = resolve_model(config)
    has_tokenizer = files.tokenizer_dir is not None or files.gguf_path is not None
    tokenizer = load_tokenizer(files) if has_tokenizer else None
    template = None
    source = files.chat_template or (tokenizer.chat_template if tokenizer is not None else None)
    if source is not None and tokenizer is not None:
        template = _template(source, tokenizer)
    ids = set(_ids(files.generation_config.get("eos_token_id"))) | set(_ids(files.config.get("eos_token_id")))
    if tokenizer is not None:
        ids |= set(tokenizer.eos_ids)
    return TextParts(
        files=files,
        tokenizer=tokenizer,
        chat_template=template,
        defaults=sampling_defaults(files.generation_config) if config.generation_config == "auto" else {},
        eos_token_ids=frozenset(ids),
    )


def _template(source: str, tokenizer: Tokenizer) -> ChatTemplate:
    from headrace.text.chat import ChatTemplate

    return ChatTemplate(source, tokenizer.special_tokens)


def _ids(value: Any) -> Iterable[int]:
    if value is None:
        return ()
    return [int(item) for item in value] if isinstance(value, list | tuple) else [int(value)]
