"""Options: precedence, names, bounds; a misspelling anywhere is an error that names it."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from commands import cli
from commands.generate import GenerateSettings
from commands.options import CompareOptions, TrainOptions, load_options
from server.config import EMBEDDED_MODEL, ServeSettings, load
from server.errors import ConfigurationError


def settings(*argv: str) -> ServeSettings:
    return load(ServeSettings, list(argv), "onehead serve")


def test_defaults() -> None:
    defaults = settings()
    assert defaults.model == EMBEDDED_MODEL and (defaults.host, defaults.port) == (
        "127.0.0.1",
        8000,
    )
    assert defaults.cache.page_size == 64 and defaults.engine.dtype == "auto"


def test_command_line_over_environment_over_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "onehead.toml"
    file.write_text(
        "port = 1\n[engine]\nmax_running = 1\nstep_tokens = 101\ndtype = "
        "'float16'\n[cache]\nmemory = '2MiB'\n"
    )
    monkeypatch.setenv("ONEHEAD_ENGINE__MAX_RUNNING", "2")
    monkeypatch.setenv("ONEHEAD_ENGINE__STEP_TOKENS", "102")
    monkeypatch.setenv("ONEHEAD_HOST", "0.0.0.0")
    loaded = settings("--config", str(file), "--engine.step_tokens", "103")
    assert (loaded.engine.max_running, loaded.engine.step_tokens, loaded.engine.dtype) == (
        2,
        103,
        "float16",
    )
    assert (loaded.host, loaded.port, loaded.cache.memory) == ("0.0.0.0", 1, 2 * 2**20)
    monkeypatch.setenv("ONEHEAD_CONFIG", str(file))
    assert settings().port == 1


def test_a_misspelt_key_is_named_wherever_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "onehead.toml"
    file.write_text("[engin]\nmax_running = 1\n")
    with pytest.raises(
        ConfigurationError,
        match=rf"^{re.escape(str(file))}: engin: no such option; did you mean engine\?$",
    ):
        settings("--config", str(file))
    file.write_text("[engine]\nmax_runing = 1\n")
    with pytest.raises(
        ConfigurationError,
        match=r"engine\.max_runing: no such option; did you mean engine\.max_running\?$",
    ):
        settings(f"--config={file}")
    with pytest.raises(SystemExit) as exit:
        settings("--engine.max_runing", "1")
    assert exit.value.code == 2 and "max_runing" in capsys.readouterr().err
    monkeypatch.setenv("ONEHEAD_ENGINE__MAX_RUNING", "1")
    with pytest.raises(
        ConfigurationError,
        match=r"ONEHEAD_ENGINE__MAX_RUNING: no such option; did you mean "
        r"ONEHEAD_ENGINE__MAX_RUNNING\?$",
    ):
        settings()


# As a pod has them where its namespace has the Services onehead and onehead-api.
SERVICE_VARIABLES = {
    "ONEHEAD_PORT": "tcp://10.0.0.1:8000",
    "ONEHEAD_SERVICE_HOST": "10.0.0.1",
    "ONEHEAD_SERVICE_PORT": "8000",
    "ONEHEAD_SERVICE_PORT_HTTP": "8000",
    "ONEHEAD_PORT_8000_TCP": "tcp://10.0.0.1:8000",
    "ONEHEAD_PORT_8000_TCP_PROTO": "tcp",
    "ONEHEAD_PORT_8000_TCP_PORT": "8000",
    "ONEHEAD_PORT_8000_TCP_ADDR": "10.0.0.1",
    "ONEHEAD_API_PORT": "udp://[fd00::1]:53",
    "ONEHEAD_API_SERVICE_HOST": "fd00::1",
    "ONEHEAD_API_SERVICE_PORT": "53",
    "ONEHEAD_API_PORT_53_UDP": "udp://[fd00::1]:53",
    "ONEHEAD_API_PORT_53_UDP_ADDR": "fd00::1",
}


def test_variables_of_a_kubernetes_service_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SERVICE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ONEHEAD_HOST", "0.0.0.0")
    assert settings().port == 8000 and settings().host == "0.0.0.0"
    assert load(GenerateSettings, ["x"], "onehead generate").prompt == "x"
    monkeypatch.setenv("ONEHEAD_PORT", "9000")
    assert settings().port == 9000


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ONEHEAD_SERVICE_HOTS", "10.0.0.1"),
        ("ONEHEAD_SERVICE_PORT", "http"),
        ("ONEHEAD_SERVER_PORT", "9000"),
        ("ONEHEAD_PROT", "tcp://10.0.0.1:8000"),
        ("ONEHEAD_PORT_8000_TCP_ADR", "10.0.0.1"),
    ],
)
def test_a_variable_that_only_resembles_a_services_is_an_error_naming_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"{name}: no such option"):
        settings()


def test_help_is_answered_in_any_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {
        "PROT": "1",
        "PORT": "x",
        "SERVER__KEYS": "x",
        "CONFIG": "/nowhere/x.toml",
    }.items():
        monkeypatch.setenv(f"ONEHEAD_{name}", value)
    with pytest.raises(SystemExit) as exit:
        settings("--help")
    assert exit.value.code == 0 and "--engine.max_running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--engine.max_running", "0"), r"engine\.max_running"),
        (
            ("--engine.max_running", "600", "--engine.step_tokens", "512"),
            r"step_tokens 512 must be at least max_running 600",
        ),
        (("--engine.dtype", "int3"), r"engine\.dtype"),
        (("--cache.memory", "lots"), r"cache\.memory: must be a share up to 1\.0, or bytes"),
        (("--cache.memory", "-1"), r"cache\.memory"),
        (("--cache.dtype", "int8"), r"cache\.dtype: Input should be .auto. or .fp8."),
        (("--engine.quantization", "fp4"), r"engine\.quantization"),
        (("--port", "70000"), "port"),
        (("--config", "/nowhere/x.toml"), "no such file"),
    ],
)
def test_bad_values_are_named(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        settings(*argv)


@pytest.mark.parametrize("content", [b"[engine", b"model = '\xff'", b"config = 'other.toml'"])
def test_a_broken_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigurationError):
        settings("--config", str(tmp_path / "x.toml"))


def test_the_last_of_two_files_holds_as_of_every_option(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("port = 1")
    (tmp_path / "y.toml").write_text("port = 2")
    assert settings("--config", f"{tmp_path}/x.toml", f"--config={tmp_path}/y.toml").port == 2


def test_another_command_reads_the_servers_file_and_refuses_the_servers_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.toml"
    file.write_text("port = 1\n[server]\nmodel_name = 'x'\n[engine]\nmax_running = 7\n")
    loaded = load(
        GenerateSettings, ["None", "--config", str(file), "--stop", "a, b "], "onehead generate"
    )
    assert (loaded.prompt, loaded.stop, loaded.engine.max_running) == ("None", "a, b ", 7)
    with pytest.raises(SystemExit):
        load(GenerateSettings, ["x", "--server.max_waiting", "1"], "onehead generate")
    file.write_text("prot = 1\n")
    with pytest.raises(ConfigurationError, match="prot: no such option"):
        load(GenerateSettings, ["x", "--config", str(file)], "onehead generate")


@pytest.mark.parametrize(
    ("text", "value"),
    [("0.5", 0.5), ("1000000", 1e6), ("500MB", 5e8), ("2 GiB", 2**31), ("1.5gib", 1.5 * 2**30)],
)
def test_memory_sizes(text: str, value: float) -> None:
    assert settings("--cache.memory", text).cache.memory == value


def test_options_of_tools_come_from_the_command_line_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.toml"
    file.write_text("steps = 3\n")
    for name, value in {
        "STEPS": "3",
        "SEED": "9",
        "ONEHEAD_SEED": "9",
        "ONEHEAD_CONFIG": str(file),
    }.items():
        monkeypatch.setenv(name, value)
    options = load_options(
        TrainOptions,
        ["--output", str(tmp_path), "--steps", "7", "--fim_rate", "0.5"],
        "onehead train",
    )
    assert options.model_dump() == TrainOptions(output=tmp_path, steps=7, fim_rate=0.5).model_dump()
    assert (options.steps, options.seed, options.learning_rate) == (7, 0, 2e-3)
    with pytest.raises(SystemExit):
        load_options(TrainOptions, ["--output", str(tmp_path), "--stepps", "7"], "onehead train")
    quick = load_options(CompareOptions, ["--output", "x", "--quick"], "onehead compare")
    assert quick.quick and quick.model is None


# Exit statuses 2 and 78, as they have always been: a value that is out of bounds or in conflict,
# and one that is not of its type.
WRONG = [
    ("train --output x --steps 0", 2, "steps: "),
    ("train --output x --weight_decay -1", 2, "weight_decay: "),
    ("train --output x --long_share 1.5", 2, "long_share: "),
    ("train --output x --sequence 5000", 2, "sequence 5000 is longer than max_positions 4096"),
    ("train --output x --init y --vocab_size 300", 2, "vocab_size 300 applies to a new model only"),
    ("train --output x --steps many", 78, "steps: "),
    ("convert --model x --output y --threads 1025", 2, "threads: "),
    (
        "convert --model x --output y --no-evaluate --data z",
        2,
        "data z has no effect with --no-evaluate",
    ),
    ("plan x --page_size 0", 2, "page_size: "),
    ("plan x --step_tokens 65537", 2, "step_tokens: "),
    ("plan x --memory 0.5", 2, "memory: "),
    ("plan x --memory lots", 78, "memory: "),
    ("plan x --dtype float8", 78, "dtype: "),
    ("compare --output x --quick=yes", 2, "--quick"),
]


@pytest.mark.parametrize(("line", "status", "message"), WRONG)
def test_wrong_values_of_tools(
    line: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert cli.main(line.split()) == status
    except SystemExit as exit:
        assert exit.code == status
    printed = capsys.readouterr().err
    assert message in printed and len(printed.splitlines()) <= 2, printed


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0 and "serve" in capsys.readouterr().out
    assert cli.main([]) == 2
    capsys.readouterr()
    assert (
        cli.main(["srve"]) == 2
        and capsys.readouterr().err == "onehead: no command 'srve'; did you mean serve?\n"
    )
    assert (
        cli.main(["xyz"]) == 2
        and capsys.readouterr().err == "onehead: no command 'xyz'; onehead --help lists all\n"
    )
    assert (
        cli.main(["--version"]) == 0
        and capsys.readouterr().out == f"onehead {version('onehead')}\n"
    )
    assert (
        cli.main(["serve", "--config", "/nowhere"]) == 78 and "/nowhere" in capsys.readouterr().err
    )


def test_the_installed_command() -> None:
    command = Path(sys.executable).parent / "onehead"
    done = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: onehead COMMAND")


KEY_DIGEST = "5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8"


@pytest.mark.parametrize(
    "given", [KEY_DIGEST, KEY_DIGEST.upper(), f"{KEY_DIGEST},{KEY_DIGEST}", f" {KEY_DIGEST} , "]
)
def test_keys_are_given_as_digests(given: str) -> None:
    settings = load(ServeSettings, ["--server.api_keys", given], "onehead serve")
    assert set(settings.server.api_keys) == {KEY_DIGEST}


def test_keys_from_the_environment_and_a_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ONEHEAD_SERVER__API_KEYS", f"{KEY_DIGEST},{'0' * 64}")
    assert load(ServeSettings, [], "onehead serve").server.api_keys == (KEY_DIGEST, "0" * 64)
    monkeypatch.delenv("ONEHEAD_SERVER__API_KEYS")
    file = tmp_path / "options.toml"
    file.write_text(f'[server]\napi_keys = ["{KEY_DIGEST}"]\ncors_origins = "http://a, http://b"\n')
    section = load(ServeSettings, ["--config", str(file)], "onehead serve").server
    assert section.api_keys == (KEY_DIGEST,) and section.cors_origins == ("http://a", "http://b")


@pytest.mark.parametrize(
    "given",
    [
        "https://app.example",
        "http://localhost:3000",
        "http://[::1]:8000",
        "https://xn--bcher-kva.example",
        "http://a.example.",
        "chrome-extension://abcdefghijklmnop",
        "tauri://localhost",
        "app://obsidian.md",
        "file://",
        "null",
        "*",
    ],
)
def test_origins_as_browsers_send_them(given: str) -> None:
    assert load(
        ServeSettings, ["--server.cors_origins", given], "onehead serve"
    ).server.cors_origins == (given,)


@pytest.mark.parametrize(
    "given",
    [
        "https://app.example/",
        "https://app.example/chat",
        "HTTPS://app.example",
        "https://App.example",
        "app.example",
        "localhost:3000",
        "*.example.com",
        "https://*.example.com",
        "https://app.example:443",
        "http://app.example:80",
        "http://app.example:99999",
        "http://user@app.example",
        "http://app.example?x",
        "http://app.example#x",
        "http://bücher.example",
        "http://[0:0:0:0:0:0:0:1]",
        "http://127.1",
        "http://",
        "//app.example",
        "http:/app.example",
        "data:",
    ],
)
def test_an_origin_that_no_page_has_is_refused(given: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(
            ServeSettings,
            ["--server.cors_origins", f"https://app.example,{given}"],
            "onehead serve",
        )
    assert str(error.value).startswith("server.cors_origins.1: ") and repr(given) in str(
        error.value
    )
    assert "https://app.example:8443" in str(error.value)


@pytest.mark.parametrize("given", ["password", KEY_DIGEST[:-1], f"{KEY_DIGEST},password"])
def test_a_key_in_place_of_its_digest_is_refused_and_not_repeated(given: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        load(ServeSettings, ["--server.api_keys", given], "onehead serve")
    assert "sha256sum" in str(error.value) and "password" not in str(error.value)


@pytest.mark.parametrize("given", [["--host", ""], ["--host", " "], ["--host="]])
def test_an_empty_host_is_not_every_interface(given: list[str]) -> None:
    with pytest.raises(
        ConfigurationError, match=r"^host: must be an address to listen on.*0\.0\.0\.0"
    ):
        settings(*given)


def test_an_empty_host_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEHEAD_HOST", "")
    with pytest.raises(ConfigurationError, match=r"^host: must be an address"):
        settings()
