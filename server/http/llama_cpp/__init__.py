"""llama.cpp's own routes, for its editors: POST /infill, /completion and /apply-template, and GET
/props.
"""

from functools import partial

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from server.http.errors import OPENAI
from server.http.handlers import Context, Handlers
from server.http.llama_cpp.fields import InfillBody, LlamaCppCompletionBody
from server.http.llama_cpp.replies import LlamaCppReply
from server.http.openai.chat_fields import TemplateBody
from server.http.routes import Route
from server.text.jobs import RenderChat


def routes(context: Context) -> list[Route]:
    """The routes of this extension."""
    handlers = LlamaCppRoutes(context)
    posted = partial(Route, methods=("POST",), dialect=OPENAI, tag="llama.cpp")
    return [
        posted("/infill", handler=handlers.infill, generates=True, body=InfillBody),
        posted(
            "/completion", handler=handlers.completion, generates=True, body=LlamaCppCompletionBody
        ),
        posted("/apply-template", handler=handlers.apply_template, body=TemplateBody),
        Route("/props", ("GET",), handlers.props, OPENAI, tag="llama.cpp"),
    ]


class LlamaCppRoutes(Handlers):
    """Handlers of llama.cpp's routes."""

    async def infill(self, http: HttpRequest) -> Response:
        """Fill the gap between two texts.

        In llama.cpp's form, for editors. The checkpoint's tokenizer must have fill-in-the-middle
        tokens.
        """
        return await self.answer(http, InfillBody, LlamaCppReply.open)

    async def completion(self, http: HttpRequest) -> Response:
        """Continue one prompt or several, in llama.cpp's form.

        With llama.cpp's names and defaults, for its editors. Others use /v1/completions.
        """
        return await self.answer(http, LlamaCppCompletionBody, LlamaCppReply.open)

    def check_model(self, body: object, http: HttpRequest) -> None:
        """Any name of a model is taken."""

    async def apply_template(self, http: HttpRequest) -> Response:
        """Show the prompt that the chat template makes of a conversation.

        Special tokens that are spelt in messages are told from those of the template only on the
        routes that take the messages themselves.
        """
        body = await self.read(http, TemplateBody)
        super().check_model(body, http)
        job = RenderChat(body.chat_input(self.generation.can_call))
        text = await self.convert(http, job)
        return await self.answers.response({"prompt": text})

    async def props(self) -> Response:
        """Show the context length and the chat template.

        What llama.cpp's editors read of its route of this name.
        """
        value = {
            "default_generation_settings": {"n_ctx": self.generation.max_total_tokens},
            "total_slots": self.generation.client.admission.max_open - self.section.max_waiting,
            "modalities": dict.fromkeys(("vision", "audio", "video"), False),
            "model_alias": self.names.shown,
            "chat_template": self.generation.codec.files.chat_template or "",
        }
        return JSONResponse(value)
