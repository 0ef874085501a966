"""Special tokens, chat template and sampling defaults of a folder; errors name the file and the
field.
"""

import json
from pathlib import Path

import pytest

from model.spec import CheckpointError
from server.text.checkpoint_settings import MAX_TEMPLATE_CHARS, CheckpointFiles


def write(folder: Path, **files: object) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(value if isinstance(value, str) else json.dumps(value))
    return folder


def test_sampling_defaults(tmp_path: Path) -> None:
    write(
        tmp_path,
        generation_config={"temperature": 0.2, "top_k": 50, "do_sample": True, "eos_token_id": 0},
    )
    assert CheckpointFiles(tmp_path).sampling_defaults == {"temperature": 0.2, "top_k": 50}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", "hot"),
        ("temperature", 1e308),
        ("temperature", 10**400),
        ("temperature", float("nan")),
        ("top_k", 1.5),
        ("top_k", True),
        ("top_k", 2**31),
        ("top_p", 0),
        ("repetition_penalty", [[1]]),
    ],
)
def test_a_sampling_default_that_no_request_could_have_is_refused(
    tmp_path: Path, key: str, value: object
) -> None:
    write(tmp_path, generation_config={key: value})
    with pytest.raises(
        CheckpointError,
        match=rf"/generation_config\.json: {key} must be (a number|an integer) within .* found ",
    ):
        CheckpointFiles(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    for name in ("tokenizer_config", "generation_config", "chat_template"):
        write(tmp_path, **{name: "[]"})
        with pytest.raises(CheckpointError, match=rf"/{name}\.json: expected a JSON object"):
            CheckpointFiles(tmp_path)
        (tmp_path / f"{name}.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"/chat_template\.jinja: not a text"):
        CheckpointFiles(tmp_path)


@pytest.mark.parametrize(
    "template",
    [7, {"a": 1}, [{"name": "default", "template": ["x"]}], "x" * (MAX_TEMPLATE_CHARS + 1)],
)
def test_a_template_that_is_no_text_is_named_with_its_field(
    tmp_path: Path, template: object
) -> None:
    with pytest.raises(
        CheckpointError, match=r"/tokenizer_config\.json: chat_template: expected a text"
    ):
        CheckpointFiles(write(tmp_path, tokenizer_config={"chat_template": template}))


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "chat_template.json",
        "tokenizer_config.json",
        "generation_config.json",
    ],
)
def test_a_link_out_of_the_folder_is_refused_unless_an_option_names_it(
    name: str, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside").write_text('{"chat_template": "x"}')
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(
        CheckpointError, match=f"/{name}: is a link to .*/outside, outside of its folder"
    ):
        CheckpointFiles(folder)
    (folder / name).unlink()
    (tmp_path / "link").symlink_to("outside")
    assert CheckpointFiles(folder, tmp_path / "link").chat_template == '{"chat_template": "x"}'


def test_of_several_templates_the_default_is_taken_whatever_the_others_are(tmp_path: Path) -> None:
    named = [
        {"name": {"a": 1}, "template": "x"},
        7,
        {"name": "default", "template": "y"},
        {"name": "tools"},
    ]
    assert (
        CheckpointFiles(write(tmp_path, tokenizer_config={"chat_template": named})).chat_template
        == "y"
    )
    assert (
        CheckpointFiles(
            write(tmp_path, tokenizer_config={"chat_template": named[:1]})
        ).chat_template
        is None
    )
