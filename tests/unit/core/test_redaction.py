"""No credential leaves, and what only looks like one a little stays."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core.redaction import is_secret_key, redact, redact_text

SECRET = "hunter2Zq9Lm4Xr7"

SECRET_KEYS = [
    "api_key", "apiKey", "API-KEY", "x-api-key", "api_keys", "admin_api_key", "openai_api_key",
    "ssl_keyfile_password", "password", "passwd", "redis_password", "dbPassword", "passphrase",
    "secret", "client_secret", "aws_secret_access_key", "AWS_ACCESS_KEY_ID", "private_key",
    "access_key", "hf_token", "HF_TOKEN", "token", "auth_token", "authToken", "access_token",
    "tokens", "api_tokens", "refresh_tokens", "authorization", "Proxy-Authorization", "cookie",
    "credentials", "bearer", "jwt", "basic_auth", "auth", "signing_key", "hmac_key",
]  # fmt: skip
PLAIN_KEYS = [
    "max_tokens", "tokenizer", "tokenizer_path", "tokenizer_mode", "token_usage", "num_tokens",
    "max_total_tokens", "prompt_tokens", "stop_token_ids", "eos_token", "pad_token", "bos_token",
    "image_token", "skip_tokenizer_init", "token_ids", "chunked_prefill_tokens", "keyfile",
    "ssl_certfile", "key", "monkey", "author", "speculative_token_map", "stop_tokens", "",
]  # fmt: skip


@pytest.mark.parametrize("key", SECRET_KEYS)
def test_secret_keys_go_at_any_depth(key: str) -> None:
    nested = {"a": [{"b": {key: SECRET, "port": 1}}], key: {"inner": SECRET}}
    assert redact(nested) == {"a": [{"b": {"port": 1}}]}


@pytest.mark.parametrize("key", PLAIN_KEYS)
def test_other_keys_stay(key: str) -> None:
    assert redact({key: "value"}) == {key: "value"}


def test_counts_that_end_in_token_stay() -> None:
    counts = {"bytes_per_token": 1024, "enable_auth": True, "tokens": [1, 2], "cost_token": 0.5}
    assert redact(counts) == counts
    assert is_secret_key("password", 123456)


SECRET_TEXTS = [
    f"redis://:{SECRET}@host:6379/0", f"https://user:{SECRET}@host/path", f"s3://{SECRET}@bucket",
    f"postgres://u:p/{SECRET}@host/db", f"https://user:p@{SECRET}@host", f"amqp://u:{SECRET}%40@h",
    f"http://host/path?api_key={SECRET}&x=1", f"http://h/?a=1&X-Amz-Signature={SECRET}",
    f"http://h/?token={SECRET}#top",
    f"Authorization: Bearer {SECRET}", f"bearer  {SECRET}", "Basic dXNlcjpodW50ZXIyWnE5TG00WHI3",
    f"password={SECRET}", f'{{"api_key": "{SECRET}"}}', f"{{'secret': '{SECRET} and more'}}",
    f'{{\\"api_key\\": \\"{SECRET}\\"}}', f"api-key : {SECRET}", f"OPENAI_API_KEY={SECRET}",
    f"serve --api-key {SECRET} --port 1", f"serve --hf-token={SECRET}", f"--token {SECRET}",
    f"HF_TOKEN={SECRET}", f"token={SECRET}",
    f"hf_{SECRET}", f"sk-{SECRET}", f"sk-proj-{SECRET}_{SECRET}", f"sk-ant-api03-{SECRET}",
    f"nvapi-{SECRET}", f"glpat-{SECRET}", f"xoxb-{SECRET}", f"ghp_{SECRET}{SECRET}",
    f"eyJ{SECRET}.eyJ{SECRET}.{SECRET}", "AKIAHUNTER2ZQ9LM4XR7"[:20],
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    f"-----BEGIN PRIVATE KEY-----\n{SECRET}\ncut short",
]  # fmt: skip
PLAIN_TEXTS = [
    "http://host:8000/path", "http://[::1]:8000/a@b", "grpc://host:1/x?y=1", "user@host",
    "https://pypi.org/@scope/pkg", "http://h:80/mail@x.org",
    "max_tokens=5", "eos_token=</s>", "token id 70 is outside the vocabulary of 64",
    "hf_transfer", "hf_overrides", "--tokenizer-path /x", "--max-total-tokens 100",
    "task-based-scheduling-policy", "sk-learn", "Basic authentication", "Bearer authentication",
    "tokenizer.json", "sampling_params.temperature: got -1.0", "meta-llama/Llama-3.1-8B-Instruct",
    "api_key=None", "0123456789abcdef0123456789abcdef01234567", "risk-adjusted-something-long",
]  # fmt: skip


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_secrets_inside_texts_are_masked(text: str) -> None:
    masked = redact_text(f"before {text} after")
    assert "[redacted]" in masked
    assert "hunter2" not in masked.lower()
    assert "dXNlcjpodW50" not in masked
    assert masked.startswith("before ")
    assert redact_text(masked) == masked
    assert "hunter2" not in json.dumps(redact({"argument": [text], text: 1})).lower()


@pytest.mark.parametrize("text", PLAIN_TEXTS)
def test_other_texts_stay(text: str) -> None:
    assert redact_text(text) == text


def test_a_masked_url_still_names_its_host() -> None:
    assert redact_text(f"redis://u:{SECRET}@h:1/0") == "redis://[redacted]@h:1/0"


def test_command_lines_headers_and_environment_entries() -> None:
    """A credential whose name is a neighbour, not a key."""
    assert redact(
        {
            "argv": ["serve", "--api-key", SECRET, "--port", "1", "--api-key", "--x"],
            "headers": [["authorization", SECRET], ["accept", "text"]],
            "env": [{"name": "HF_TOKEN", "value": SECRET}, {"name": "A", "value": "b"}],
        }
    ) == {
        "argv": ["serve", "--api-key", "[redacted]", "--port", "1", "--api-key", "--x"],
        "headers": [["authorization", "[redacted]"], ["accept", "text"]],
        "env": [{"name": "HF_TOKEN", "value": "[redacted]"}, {"name": "A", "value": "b"}],
    }


@pytest.mark.parametrize(
    "piece",
    ["a", "://", "://a:b", "eyJ", "sk-", "hf_", "api_key", "?key", "--token ", "'", "bearer ",
     "-----BEGIN PRIVATE KEY-----", "password:", "://u:p/", "Basic a", "token=", "secret\\\"=\"a"],
)  # fmt: skip
def test_hostile_texts_take_no_time(piece: str) -> None:
    """Text from a request reaches logs and status details: no pattern may run away on it."""
    text = piece * (100_000 // len(piece))
    start = time.process_time()
    redact_text(text)
    assert time.process_time() - start < 2


def test_an_ordinary_log_line_is_cheap() -> None:
    """Every log line passes here; 100 microseconds each would show on a busy server."""
    line = "generate id=chatcmpl-0123456789abcdef stream=True prompt=812 output=64 stop 1.234s"
    start = time.process_time()
    for _ in range(1000):
        redact_text(line)
    assert time.process_time() - start < 0.1


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
keys = st.one_of(st.text(max_size=10), st.sampled_from(PLAIN_KEYS))
json_values = st.one_of(
    leaves,
    st.lists(leaves, max_size=4),
    st.dictionaries(keys, st.one_of(leaves, st.lists(leaves, max_size=2)), max_size=4),
)


@st.composite
def with_secret(draw: st.DrawFn) -> dict[str, object]:
    """A configuration with one credential somewhere in it, named by a key or seen in a text."""
    value: object = draw(
        st.one_of(
            st.sampled_from(SECRET_KEYS).map(lambda key: {key: SECRET}),
            st.sampled_from(SECRET_TEXTS),
        )
    )
    for _ in range(draw(st.integers(0, 5))):
        around = draw(json_values)
        value = draw(st.sampled_from([{"x": value, "y": around}, [around, value], (value,)]))
    return {"args": value}


@given(with_secret())
def test_the_secret_is_gone_wherever_it_was(configuration: dict[str, object]) -> None:
    plain = redact(configuration)
    assert "hunter2" not in json.dumps(plain, allow_nan=False).lower()
    assert redact(plain) == plain


@given(st.dictionaries(st.text(max_size=20), json_values, max_size=5))
def test_redacting_never_raises_and_is_stable(configuration: dict[str, object]) -> None:
    plain = redact(configuration)
    assert redact(plain) == plain


@given(
    st.lists(
        st.sampled_from(
            ["api_key", "token", "=", ": ", '"', "'", "\\", " ", "Bearer ", "://", "@", "a:b", "--",
             "hf_", "sk-", SECRET, "[redacted]", "Basic ", "&key=", "x", "\n", "]", "none"]
        ),
        max_size=12,
    ).map("".join)
)  # fmt: skip
def test_masking_twice_is_masking_once(text: str) -> None:
    once = redact_text(text)
    assert redact_text(once) == once


@pytest.mark.parametrize("key", ["auth_token_file", "api-key-path", "secretDir"])
def test_where_a_credential_lies_is_no_credential(key: str) -> None:
    """An operator has to see which file was meant."""
    assert redact({key: "/etc/tokens"}) == {key: "/etc/tokens"}
    assert (
        redact_text("--auth-token-file: got '/etc/tokens'")
        == "--auth-token-file: got '/etc/tokens'"
    )
    assert "hunter2" not in redact_text("auth_token: 'hunter2hunter2'")
