"""Errors that reach a person. Each carries one clear sentence, an HTTP status and a machine-readable code."""

from __future__ import annotations


class KVScopeError(Exception):
    """Base of all expected errors. `str(error)` is one sentence fit for the page, the API and the command line."""

    status: int = 500
    code: str = "internal_error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        if code is not None:
            self.code = code


class InvalidRequest(KVScopeError):
    """The caller asked for something that makes no sense (400)."""

    status = 400
    code = "invalid_request"


class ContextOverflow(InvalidRequest):
    """The prompt leaves no room for one new token (400)."""

    code = "context_length_exceeded"


class NotFound(KVScopeError):
    """The named session, message or model does not exist (404)."""

    status = 404
    code = "not_found"


class Conflict(KVScopeError):
    """The session is busy with another turn (409)."""

    status = 409
    code = "session_busy"


class Stopped(KVScopeError):
    """Long work beside the replies was stopped by hand (409)."""

    status = 409
    code = "stopped"


class Forbidden(KVScopeError):
    """What was asked for is switched off (403)."""

    status = 403
    code = "forbidden"


class ModelFileError(KVScopeError):
    """A model can't be found, fetched or read. Ends the start with exit code 2."""

    status = 400
    code = "model_error"


class ConfigError(KVScopeError):
    """A setting is impossible on this machine or for this model. Ends the start with exit code 2."""

    status = 400
    code = "config_error"


class StorageFailed(KVScopeError):
    """The disk did not take what was to be kept (507)."""

    status = 507
    code = "storage_failed"


class NonFiniteValues(KVScopeError):
    """K, V or logits held NaN or infinity; the turn ended and the cache was rolled back to the turn's start."""

    code = "non_finite_values"


class EngineBusy(KVScopeError):
    """Work beside the replies found no time (503)."""

    status = 503
    code = "engine_busy"


class EngineStopped(KVScopeError):
    """The engine thread has ended; nothing more can be generated (503)."""

    status = 503
    code = "engine_stopped"
