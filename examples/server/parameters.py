"""The parameters of a request, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from support.tokenizer import Tokenizer

from . import conversation
from .errors import ApiError

#: Fields that would change the answer if they had another value than these, which are like leaving them out.
FIXED: dict[str, tuple[Any, ...]] = {
    "temperature": (0,),
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "suffix": ("",),
    "tools": ([],),
    "response_format": ({"type": "text"},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
}
STOPS = 4  # strings, as many as OpenAI's API takes
COMPLETION, CHAT = 16, 256  # tokens of an answer, unless the request says how many


@dataclass(frozen=True)
class Parameters:
    """What is to be generated, and how it is to be sent."""

    chat: bool
    prompt: list[int]
    max_tokens: int
    stops: list[str]
    stream: bool
    usage: bool
    """Send the number of tokens at the end of a stream."""
    token_ids: bool
    """Send the tokens beside their text."""


@dataclass(frozen=True)
class Reader:
    """A reader of requests to one model.

    :param vocabulary: the number of tokens that there are.
    :param room: the most tokens of a prompt and its answer.
    """

    model: str
    tokenizer: Tokenizer
    vocabulary: int
    room: int

    def read(self, body: Any, *, chat: bool) -> Parameters:
        """Return the parameters of a request.

        :raises ApiError: if it is malformed, asks for another model, or asks for what the model cannot do.
        """
        if not isinstance(body, dict):
            raise ApiError("the body must be a JSON object")
        self._check_model(body.get("model"))
        for name, values in FIXED.items():
            if body.get(name) is not None and body[name] not in values:
                raise ApiError(f"{name} can only be {values[0]!r} here", param=name, code="unsupported_value")
        prompt = self._prompt(body, chat)
        options = _of(body, "stream_options", dict, {})
        return Parameters(
            chat,
            prompt,
            self._max_tokens(body, len(prompt), chat),
            _stops(body.get("stop")),
            stream=_of(body, "stream", bool, False),
            usage=_of(options, "include_usage", bool, False),
            token_ids=_of(body, "return_token_ids", bool, False),
        )

    def _check_model(self, model: Any) -> None:
        if not isinstance(model, str):
            raise ApiError("model must be the name of a model", param="model")
        if model != self.model:
            raise ApiError(
                f"the model {model!r} does not exist; this server has {self.model!r}",
                status=404,
                code="model_not_found",
                param="model",
            )

    def _prompt(self, body: dict[str, Any], chat: bool) -> list[int]:
        asked = conversation.prompt(body.get("messages")) if chat else body.get("prompt")
        if isinstance(asked, list) and len(asked) == 1 and isinstance(asked[0], str):
            (asked,) = asked
        if isinstance(asked, str):
            try:
                asked = self.tokenizer.encode(asked)
            except UnicodeEncodeError:
                raise ApiError("the prompt has half of a surrogate pair", param="prompt") from None
        size = self.vocabulary
        if not isinstance(asked, list) or not all(type(token) is int and 0 <= token < size for token in asked):
            raise ApiError(f"prompt must be text, or a list of tokens from 0 to {size - 1}", param="prompt")
        if not asked:
            raise ApiError("the prompt is empty", param="prompt")
        return asked

    def _max_tokens(self, body: dict[str, Any], prompt: int, chat: bool) -> int:
        room = self.room - prompt
        name = "max_completion_tokens" if chat and body.get("max_completion_tokens") is not None else "max_tokens"
        wanted: int = _of(body, name, int, max(1, min(CHAT if chat else COMPLETION, room)))
        if wanted < 1:
            raise ApiError(f"{name} must be at least 1, not {wanted}", param=name)
        if wanted > room:
            raise ApiError(
                f"the prompt has {prompt} tokens and the answer up to {wanted}, and there is room for {self.room}",
                code="context_length_exceeded",
                param=name if prompt < self.room else "messages" if chat else "prompt",
            )
        return wanted


def _of(body: dict[str, Any], name: str, kind: type[Any], default: Any) -> Any:
    """Return a field of a type, or the default if it is missing or null."""
    value = body.get(name)
    if value is None:
        return default
    if type(value) is not kind:
        names = {bool: "true or false", int: "a whole number", dict: "an object"}
        raise ApiError(f"{name} must be {names[kind]}, not {value!r}", param=name)
    return value


def _stops(stop: Any) -> list[str]:
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > STOPS or not all(isinstance(each, str) and each for each in stops):
        raise ApiError(f"stop must be a string, or a list of up to {STOPS} of them", param="stop")
    return stops
