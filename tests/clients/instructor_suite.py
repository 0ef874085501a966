"""instructor in the mode that asks the server for a schema."""

from importlib.metadata import version
from typing import Literal

import instructor
import openai
from check import run
from pydantic import BaseModel, Field


class Answer(BaseModel):
    """What is to be extracted."""

    kind: Literal["greeting", "question"]
    count: int = Field(ge=0, le=9)


def json_schema_mode(url: str) -> None:
    client = instructor.from_openai(openai.OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.JSON_SCHEMA)
    answer = client.chat.completions.create(
        model="embedded", messages=[{"role": "user", "content": "hi"}], response_model=Answer, max_tokens=60, temperature=0, max_retries=0
    )
    assert isinstance(answer, Answer) and 0 <= answer.count <= 9


run("instructor", version("instructor"), [json_schema_mode])
