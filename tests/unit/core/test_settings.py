from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.parsers import Parser
from smg_grpc_servicer.core.settings import Setting, Settings, Values

PORT = Setting("port", parsers.PORT, 50051, "the port", "--port", "T_PORT", ("T_OLD_PORT",))
LIMIT: Setting[int | None] = Setting(
    "limit", parsers.BYTES, None, "100% of it", "--limit", "T_LIMIT"
)
ON = Setting("on", parsers.BOOLEAN, True, "a switch", "--on", "T_ON")
NAMES: Setting[tuple[str, ...]] = Setting(
    "names", parsers.list_of(parsers.TEXT), (), "names", "--names", "T_NAMES"
)
KEY: Setting[int | None] = Setting(
    "key", parsers.COUNT, None, "a number nobody may see", "--key", "T_KEY", secret=True
)
GROUP = Settings(PORT, LIMIT, ON, NAMES, KEY)


def resolve(*arguments: str, env: dict[str, str] | None = None) -> Values:
    parser = argparse.ArgumentParser()
    GROUP.add_to(parser)
    return GROUP.resolve(parser.parse_args(arguments), env or {})


def test_flag_beats_variable_beats_default() -> None:
    assert resolve().get_value(PORT) == 50051
    values = resolve(env={"T_PORT": "1"})
    assert (values.get_value(PORT), values.sources["port"]) == (1, "env T_PORT")
    values = resolve("--port", "2", env={"T_PORT": "1"})
    assert (values.get_value(PORT), values.sources["port"]) == (2, "flag")
    assert values["port"] == 2
    assert values.changed() == {"port": "2 (flag)"}


def test_a_blank_variable_is_not_set() -> None:
    assert resolve(env={"T_PORT": "  ", "T_ON": ""}).sources["port"] == "default"


def test_switches_have_two_forms_and_one_convention() -> None:
    assert resolve("--no-on").get_value(ON) is False
    assert resolve("--on", env={"T_ON": "off"}).get_value(ON) is True
    for word in ("0", "false", "NO", " off "):
        assert resolve(env={"T_ON": word}).get_value(ON) is False
    for word in ("1", "True", "yes", "on"):
        assert resolve("--no-on", env={"T_ON": word}).get_value(ON) is False


def test_lists_are_words_or_commas() -> None:
    assert resolve("--names", "a", "b").get_value(NAMES) == ("a", "b")
    assert resolve(env={"T_NAMES": "a, b,"}).get_value(NAMES) == ("a", "b")
    assert resolve("--names", "a", "b").describe()["names"] == "a,b (flag)"


def test_all_faults_are_told_at_once() -> None:
    """Each names the flag or variable that was used, what was got and what is allowed."""
    with pytest.raises(ConfigError, match=r".") as error:
        resolve("--port", "99999", "--limit", "-5", env={"T_ON": "perhaps", "T_NAMES": ","})
    port, limit, on, names = str(error.value).splitlines()
    assert port == "--port: got '99999'; allowed: a port number from 0 (any free one) to 65535"
    assert limit == "--limit: got '-5'; allowed: a size in bytes such as 1048576, 512MiB or 2G"
    assert on == "T_ON: got 'perhaps'; allowed: 1, true, yes, on or 0, false, no, off"
    assert names.startswith("T_NAMES: got ','; allowed: one or more of")


def test_a_secret_is_never_shown() -> None:
    with pytest.raises(ConfigError) as error:
        resolve("--key", "hunter2")
    assert "hunter2" not in str(error.value)
    values = resolve("--key", "12345")
    assert "12345" not in str(values.describe())
    assert values.get_value(KEY) == 12345


def test_an_old_variable_still_counts_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    assert resolve(env={"T_OLD_PORT": "5"}).get_value(PORT) == 5
    assert caplog.messages == ["T_OLD_PORT is deprecated; set T_PORT"]
    caplog.clear()
    assert resolve(env={"T_OLD_PORT": "5", "T_PORT": "6"}).get_value(PORT) == 6
    assert caplog.messages == []


@pytest.mark.parametrize(
    "link", ["tcp://10.96.0.7:50051", " TCP://[fd00::7]:1", "udp://10.0.0.1:1"]
)
def test_a_service_link_of_kubernetes_is_no_port(
    link: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A service named as our variables begin must not keep the server from starting: told once."""
    values = resolve(env={"T_PORT": link})
    assert (values.get_value(PORT), values.sources["port"]) == (50051, "default")
    (warning,) = caplog.messages
    assert warning.startswith(f"T_PORT={link!r} is ignored: Kubernetes set it")
    assert warning.endswith("use --port")
    caplog.clear()
    assert resolve("--port", "7", env={"T_PORT": link}).get_value(PORT) == 7
    assert caplog.messages == []


def test_only_a_ports_variable_can_be_a_service_link() -> None:
    """A flag is somebody's choice, and other variables are never set by Kubernetes."""
    with pytest.raises(ConfigError, match="--port: got 'tcp://10"):
        resolve("--port", "tcp://10.96.0.7:50051")
    with pytest.raises(ConfigError, match="T_LIMIT: got 'tcp://10"):
        resolve(env={"T_LIMIT": "tcp://10.96.0.7:50051"})
    with pytest.raises(ConfigError, match="T_PORT: got 'http://10"):
        resolve(env={"T_PORT": "http://10.96.0.7:50051"})


def test_parsing_twice_is_the_same_and_leaves_the_environment_alone() -> None:
    """Weak point 6 of the published package: a flag leaked into later parses and children."""
    before = dict(os.environ)
    assert resolve("--port", "5").get_value(PORT) == 5
    assert resolve().get_value(PORT) == 50051
    assert dict(os.environ) == before


def test_help_shows_default_and_variable() -> None:
    parser = argparse.ArgumentParser()
    GROUP.add_to(parser)
    text = " ".join(parser.format_help().split())
    assert "the port (default: 50051; env: T_PORT)" in text
    assert "100% of it (env: T_LIMIT)" in text
    assert "a switch (default: on; env: T_ON)" in text


def test_help_shows_the_default_of_a_secret() -> None:
    """It is in the source for all to read, and whoever sets it has to know its form."""
    url = Setting("url", parsers.TEXT, "redis://127.0.0.1", "where", "--url", secret=True)
    assert url.explain() == "where (default: redis://127.0.0.1)"


def test_values_of_a_program_that_has_no_argparse() -> None:
    values = GROUP.resolve({"port": 7, "on": False, "names": ("x", "y")}, {})
    assert [values[s.name] for s in (PORT, ON, NAMES)] == [7, False, ("x", "y")]


def test_required() -> None:
    model: Setting[str] = Setting("model", parsers.TEXT, "", "m", "--model", required=True)
    with pytest.raises(ConfigError, match="--model: not given"):
        Settings(model).resolve({}, {})


def test_groups_add_up_and_names_are_unique() -> None:
    both = Settings(PORT) + Settings(ON)
    assert len(both) == 2
    with pytest.raises(ValueError, match="share a name"):
        both + Settings(ON)


GOOD: list[tuple[Parser[Any], str, object]] = [
    (parsers.PORT, "0", 0),
    (parsers.HOST, "[::1]", "::1"),
    (parsers.POSITIVE_INT, "1", 1),
    (parsers.COUNT, "0", 0),
    (parsers.SECONDS, "0", 0.0),
    (parsers.SECONDS, "2.5s", 2.5),
    (parsers.POSITIVE_SECONDS, "0.1", 0.1),
    (parsers.BYTES, "512MiB", 512 * 2**20),
    (parsers.BYTES, "1.5 KiB", 1536),
    (parsers.BYTES, "2g", 2 * 10**9),
    (parsers.BYTES, "7b", 7),
    (parsers.BYTES_OR_ZERO, "0", 0),
    (parsers.BYTES_OR_ZERO, "0MiB", 0),
    (parsers.BYTES_INT32, "2147483647", 2**31 - 1),
    (parsers.POSITIVE_INT32, "2147483647", 2**31 - 1),
    (parsers.TEXT, " a ", "a"),
    (parsers.one_of("json", "text"), "JSON", "json"),
]
BAD: list[tuple[Parser[Any], str]] = [
    (parsers.PORT, "70000"),
    (parsers.HOST, "host:5"),
    (parsers.POSITIVE_INT, "0"),
    (parsers.POSITIVE_INT, "1.5"),
    (parsers.COUNT, "-1"),
    (parsers.SECONDS, "nan"),
    (parsers.SECONDS, "inf"),
    (parsers.SECONDS, "-1"),
    (parsers.POSITIVE_SECONDS, "0"),
    (parsers.BYTES, "0"),
    (parsers.BYTES, "5 apples"),
    (parsers.BYTES_OR_ZERO, "-1"),
    (parsers.BYTES_INT32, "0"),
    (parsers.BYTES_INT32, "2GiB"),
    (parsers.BYTES_INT32, "1" * 30),
    (parsers.POSITIVE_INT32, "0"),
    (parsers.POSITIVE_INT32, "2147483648"),
    (parsers.BYTES, ""),
    (parsers.BOOLEAN, "2"),
    (parsers.TEXT, "  "),
    (parsers.one_of("json", "text"), "xml"),
    (parsers.FILE, "/no/such/file"),
    (parsers.FILE, "~no-such-user/file"),
    (parsers.DIRECTORY, "/no/such/directory"),
]


@pytest.mark.parametrize(("parser", "text", "value"), GOOD)
def test_parsers_take(parser: Parser[Any], text: str, value: object) -> None:
    assert parser(text) == value


@pytest.mark.parametrize(("parser", "text"), BAD)
def test_parsers_refuse(parser: Parser[Any], text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the text is made by settings
        parser(text)


def test_files_must_be_there(tmp_path: Path) -> None:
    file = tmp_path / "file"
    setting: Setting[Path | None] = Setting("f", parsers.FILE, None, "f", "--f")
    with pytest.raises(ConfigError, match=r"--f: got .* \(No such file or directory\); allowed"):
        Settings(setting).resolve({"f": str(file)}, {})
    file.touch()
    assert Settings(setting).resolve({"f": str(file)}, {}).get_value(setting) == file
    with pytest.raises(ConfigError, match="directory"):
        Settings(setting).resolve({"f": str(tmp_path)}, {})


@given(st.integers(1, 2**50))
def test_sizes_are_shown_as_they_are_read(size: int) -> None:
    assert parsers.BYTES(parsers.show_bytes(size)) == size


@given(st.text(max_size=30))
def test_any_text_is_a_value_or_a_config_error(text: str) -> None:
    logging.disable(logging.NOTSET)
    try:
        values = GROUP.resolve(dict.fromkeys(("port", "limit", "on", "names", "key"), text), {})
    except ConfigError:
        return
    assert len(values) == len(GROUP)


def test_flags_can_stand_apart_in_somebody_elses_namespace() -> None:
    """Under a prefix, and absent where they are not given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--their-port", dest="port", default=1)
    GROUP.add_to(parser, prefix="our_", default=argparse.SUPPRESS)
    assert vars(parser.parse_args([])) == {"port": 1}
    assert vars(parser.parse_args(["--port", "2", "--no-on"])) == {
        "port": 1,
        "our_port": "2",
        "our_on": False,
    }


def test_a_fifo_is_no_file_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    with pytest.raises(ValueError, match="not a regular file"):
        parsers.FILE(str(tmp_path / "pipe"))
