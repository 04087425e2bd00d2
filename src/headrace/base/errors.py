"""The typed error hierarchy of Headrace.

Every error that can reach a user carries an HTTP status, whether a retry can help, a stable ``code``
and a message that says what to do. This module must not import anything from the package.
"""

from __future__ import annotations

from typing import ClassVar


class HeadraceError(Exception):
    """Root of all errors that Headrace raises on purpose.

    Attributes:
        http_status: status of the HTTP answer that carries this error.
        retryable: True if the same request may succeed later without a change.
        code: stable machine-readable name, sent as ``error.code``.
        kind: OpenAI's ``error.type``.
        param: name of the request field or option at fault, or None.
    """

    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    code: ClassVar[str] = "internal_error"
    kind: ClassVar[str] = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvariantError(HeadraceError):
    """An internal fact does not hold. Always a bug of Headrace, never of a user."""

    code = "invariant_violated"


class ConfigError(HeadraceError):
    """An option, or a combination of options, that cannot work. Raised before anything starts."""

    http_status = 400
    code = "invalid_config"
    kind = "invalid_request_error"


class ModelSourceError(ConfigError):
    """The model directory, file or hub name cannot be read."""

    code = "model_source"


class UnsupportedModelError(ConfigError):
    """The architecture, tensor type or feature of the model is not implemented."""

    code = "unsupported_model"


class WeightLoadError(ConfigError):
    """A parameter is missing, surplus, loaded twice, misshapen or truncated; the message names it."""

    code = "weight_load"


class InsufficientMemoryError(ConfigError):
    """The model or its KV cache does not fit; the message has the numbers and the flag to change."""

    code = "insufficient_memory"


class AddressInUseError(ConfigError):
    """The address to listen on is taken or not allowed; the message says by whom, if known, and what to do."""

    code = "address_in_use"


class RequestError(HeadraceError):
    """The request is wrong; only the client can mend it."""

    http_status = 400
    code = "invalid_request"
    kind = "invalid_request_error"


class UnknownFieldError(RequestError):
    """A request field that does not exist; the message has the nearest known name."""

    code = "unknown_field"


class ContextLengthError(RequestError):
    """Prompt plus requested tokens exceed the model's length."""

    code = "context_length_exceeded"


class NeverFitsError(RequestError):
    """The request needs more KV blocks than the whole cache has; the message has the numbers."""

    code = "kv_cache_too_small"


class MediaTooLargeError(RequestError):
    """A media item needs more of the encoder than one step has; the message has the numbers."""

    code = "media_too_large"


class PayloadTooLargeError(RequestError):
    """The body of the HTTP request is above the limit."""

    http_status = 413
    code = "payload_too_large"


class MethodNotAllowedError(RequestError):
    """The URL exists, but not with this HTTP method."""

    http_status = 405
    code = "method_not_allowed"


class UnsupportedMediaTypeError(RequestError):
    """The body is not declared as JSON."""

    http_status = 415
    code = "unsupported_media_type"


class TemplateError(RequestError):
    """The chat template raised, ran too long or produced too much."""

    code = "chat_template"


class AuthenticationError(RequestError):
    """Missing or wrong API key."""

    http_status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class NotFoundError(RequestError):
    """No such model, endpoint or object."""

    http_status = 404
    code = "not_found"
    kind = "not_found_error"


class NotImplementedFeatureError(RequestError):
    """Known to the API but not built; says so instead of ignoring the field."""

    http_status = 501
    code = "not_implemented"


class OverloadedError(HeadraceError):
    """The queue is full."""

    http_status = 503
    retryable = True
    code = "overloaded"
    kind = "overloaded_error"


class EngineUnavailableError(HeadraceError):
    """The engine core is starting, restarting or gone."""

    http_status = 503
    retryable = True
    code = "engine_unavailable"


class RequestTimeoutError(HeadraceError):
    """The request lived longer than it may: its own ``timeout``, or the server's ``--request-timeout-s``."""

    http_status = 504
    code = "request_timeout"
    kind = "timeout_error"


class EngineFaultError(HeadraceError):
    """This request was on the device in two crashes in a row and is failed as the likely cause."""

    code = "engine_fault"


class NumericalError(HeadraceError):
    """The model produced NaN or infinite logits for this request."""

    code = "non_finite_logits"


class ProtocolError(HeadraceError):
    """A message of another wire version or shape."""

    code = "protocol"


def invariant(condition: bool, message: str) -> None:
    """Check an internal fact, also under ``python -O``.

    Raises:
        InvariantError: if ``condition`` is false.
    """
    if not condition:
        raise InvariantError(message)
