"""Tests that secrets are removed, and that similar words stay."""

import collections

import pytest

from events import redact, redact_arguments, redact_text
from events.redaction import REDACTED

# Invented, in the form of the real thing; put together so that no scanner takes them for one.
GITHUB = "ghp_" + "a1B2" * 9
SECRETS = {
    "aws access key": "AKIA" + "ABCDEFGH12345678",
    "aws session key": "ASIA" + "ABCDEFGH12345678",
    "github": GITHUB,
    "github app": "ghs_" + "a1B2" * 9,
    "github fine-grained": "github_pat_" + "11ABCDEFG0" * 3,
    "gitlab": "glpat-" + "aB3_" * 5,
    "hugging face": "hf_" + "aBcD" * 9,
    "openai": "sk-" + "aB3d" * 12,
    "openai project": "sk-proj-" + "aB3d" * 12,
    "anthropic": "sk-ant-api03-" + "aB3d" * 12 + "-xyzAA",
    "deepseek": "sk-" + "0123456789abcdef" * 2,
    "stripe": "sk_live_" + "aB3d" * 6,
    "google": "AIza" + "aB3d-" * 7,
    "google oauth": "ya29." + "aB3d_" * 8,
    "databricks": "dapi" + "0123456789abcdef" * 2,
    "pypi": "pypi-AgE" + "aB3d" * 12,
    "npm": "npm_" + "aB3d" * 9,
    "wandb": "wandb_v1_" + "aB3d" * 8,
    "slack bot": "xoxb-" + "123456789012-abcdefGHIJ",
    "slack app": "xapp-" + "1-A0123456789-abcdef",
    "slack webhook": "https://hooks.slack.com/services/" + "T000/B000/abcDEF",
    "discord webhook": "https://discord.com/api/webhooks/" + "1234/abc-DEF_ghi",
    "json web token": "eyJhbGciOiJI.eyJzdWIiOiIx.SflKxwRJSMeKKF2QT4",
    "private key": "-----BEGIN RSA PRIVATE KEY-----\nMIIE\nabc\n-----END RSA PRIVATE KEY-----",
    "openssh key cut short": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Blbn",
}

SECRET_KEYS = [
    *("password", "PASSWORD", "db_password", "userPassword", "passwd", "ssh_passphrase", "passwords"),
    *("secret", "client_secret", "clientSecret", "CLIENT-SECRET", "aws_secret_access_key", "secrets"),
    *("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "aws_access_key_id", "awsAccessKeyId", "AWSAccessKeyId"),
    *("api_key", "apikey", "apiKey", "APIKey", "OPENAI_API_KEY", "wandb.api_key", "X-Api-Key", "api_keys"),
    *("token", "TOKEN", "hf_token", "HF_TOKEN", "hub_token", "auth_token", "authToken", "access_token"),
    *("GITHUB_TOKEN", "refresh_token", "bearer_token", "slack_bot_token", "model.hub.token", "hf_token_2"),
    *("credentials", "gcp_credential", "private_key", "privateKey", "account_key", "auth_key", "ssh_key"),
    *("signing_key", "encryption_key", "Authorization", "azure_connection_string"),
]
INNOCENT = {
    "num_tokens": 512,
    "tokens": 3_000_000,
    "tokenizer": "gpt2",
    "tokenizer_name": "bert-base",
    "max_token_length": 77,
    "max_tokens": "2k",
    "token": 7,
    "tokens_per_second": 1e4,
    "tokenization": "bpe",
    "token_mixer": "conv",
    "token_pooling": "mean",
    "token_type": "cls",
    "token_dropout": 0.1,
    "token_embedding": "learned",
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "mask_token": "[MASK]",
    "image_token": "<image>",
    "decoder_start_token": "<s>",
    "prompt_token": "<prompt>",
    "cls_token_id": 101,
    "additional_special_tokens": ["<a>", "<b>"],
    "primary_key": "id",
    "foreign_key": "user",
    "key": "loss",
    "keys": ["a", "b"],
    "key_dim": 64,
    "sort_key": "name",
    "num_key_value_heads": 8,
    "keyboard": "us",
    "monkey": "capuchin",
    "secretary": "jo",
    "compass": "north",
    "passes": 3,
    "author": "jo",
    "author_key": "jo",
    "run_name": "sk-learn-pipeline-for-digits-version-2",
    "path": "/data/task-12345678901234567890/files",
    "commit": "0123456789abcdef0123456789abcdef01234567",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "url": "https://example.com:8080/a?b=c&d=e",
    "email": "jo@example.com",
    "s3": "s3://bucket/key",
    "lr": 3e-4,
}


@pytest.mark.parametrize("secret", SECRETS.values(), ids=SECRETS)
def test_a_value_that_looks_like_a_secret_is_taken_out_of_any_text(secret):
    """Nothing of it is left, wherever it stands."""
    for template in ("{}", "value: {}", "see '{}', then go on", "a={}&b=2", "(x, {})"):
        redacted = redact_text(template.format(secret))

        assert secret not in redacted
        assert secret[-8:] not in redacted
        assert REDACTED in redacted


def test_a_key_that_names_a_secret_hides_its_value():
    """Whatever the value is: a string, or a structure with the secret somewhere in it."""
    for key in SECRET_KEYS:
        assert redact({key: "hunter2", "lr": 0.1}) == {key: REDACTED, "lr": 0.1}
        assert redact({key: {"value": ["hunter2"]}}) == {key: REDACTED}


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{}=hunter2", "{}=[redacted]"),
        ("{} = hunter2, lr = 1", "{} = [redacted], lr = 1"),
        ("f({}='two words', lr=1)", "f({}='[redacted]', lr=1)"),
        ("{{'{}': 'hunter2', 'lr': 1}}", "{{'{}': '[redacted]', 'lr': 1}}"),
        ('{{"{}":"hunter2","lr":1}}', '{{"{}":"[redacted]","lr":1}}'),
        ("{}: hunter2\nlr: 1", "{}: [redacted]\nlr: 1"),
        ("--{} hunter2 --lr 1", "--{} [redacted] --lr 1"),
        ("--{}=hunter2 --lr=1", "--{}=[redacted] --lr=1"),
        ("args: {}=hunter2", "args: {}=[redacted]"),
        ('{}="with \\" inside" x', '{}="[redacted]" x'),
        ("{}='cut short", "{}='[redacted]"),
        ("{}=b'hunter2'.", "{}=b'[redacted]'."),
    ],
)
def test_an_assigned_secret_is_taken_out_of_text(template, expected):
    """Python, JSON, YAML, shell: the value goes, and what stands around it stays."""
    redacted = [redact_text(template.format(key)) for key in SECRET_KEYS]

    assert redacted == [expected.format(key) for key in SECRET_KEYS]


@pytest.mark.parametrize(("key", "value"), INNOCENT.items(), ids=INNOCENT)
def test_a_word_that_only_resembles_a_secret_is_kept(key, value):
    """Vocabulary, keys of dictionaries, names, hashes and addresses are not secrets."""
    assert redact({key: value}) == {key: value}
    assert redact_text(f"{key}={value}") == f"{key}={value}"
    assert redact_arguments([f"--{key}={value}", f"--{key}", str(value)]) == [
        f"--{key}={value}",
        f"--{key}",
        str(value),
    ]


@pytest.mark.parametrize("value", [None, True, False, "", "None", "false"])
def test_a_switch_or_nothing_is_no_secret(value):
    """`use_auth_token=True` says something worth knowing."""
    assert redact({"use_auth_token": value, "password": value}) == {
        "use_auth_token": value,
        "password": value,
    }


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("postgres://jo:hunter2@db/x", "postgres://jo:[redacted]@db/x"),
        ("redis://:hunter2@cache:6379", "redis://:[redacted]@cache:6379"),
        ("postgres://jo:p@ss@db/x", "postgres://jo:[redacted]@db/x"),
        (f"https://oauth2:{GITHUB}@github.com/a/b.git", "https://oauth2:[redacted]@github.com/a/b.git"),
        (
            "https://b.s3.amazonaws.com/k?X-Amz-Signature=abc&x=1",
            "https://b.s3.amazonaws.com/k?X-Amz-Signature=[redacted]&x=1",
        ),
        (
            "https://storage.googleapis.com/b/k?X-Goog-Signature=abc",
            "https://storage.googleapis.com/b/k?X-Goog-Signature=[redacted]",
        ),
        (
            "https://a.blob.core.windows.net/c?sv=1&sig=ab%3D",
            "https://a.blob.core.windows.net/c?sv=1&sig=[redacted]",
        ),
        ("https://example.com/?token=abc&b=2", "https://example.com/?token=[redacted]&b=2"),
    ],
)
def test_a_secret_inside_an_address_is_taken_out(url, expected):
    """Passwords and signatures go, the rest of the address stays."""
    assert redact_text(f"GET {url} failed") == f"GET {expected} failed"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("Authorization: Bearer abc.def", "Authorization: [redacted]"),
        ("Authorization: Basic am86aHVudGVyMg==", "Authorization: [redacted]"),
        ("{'Authorization': 'Bearer abc', 'n': 1}", "{'Authorization': '[redacted]', 'n': 1}"),
        ("sent Bearer abcdefgh12345678 to x", "sent Bearer [redacted] to x"),
        ("a bearer of good news", "a bearer of good news"),
    ],
)
def test_a_secret_in_a_header_is_taken_out(header, expected):
    """The scheme does not matter."""
    assert redact_text(header) == expected


def test_structures_are_gone_through():
    """Mappings, lists, tuples and named tuples, at any depth; types stay."""
    Point = collections.namedtuple("Point", ["token", "name"])  # noqa: PYI024  # no types to give
    value = {"a": [{"b": ({"api_key": "x"}, f"key {GITHUB}")}], "p": Point("x", "y"), "n": 1}

    redacted = redact(value)

    assert redacted == {
        "a": [{"b": ({"api_key": REDACTED}, f"key {REDACTED}")}],
        "p": Point(REDACTED, "y"),
        "n": 1,
    }
    assert type(redacted["p"]) is Point


def test_the_callers_containers_are_not_changed():
    """Redaction makes its own."""
    value = {"a": [{"api_key": "x"}]}

    redact(value)

    assert value == {"a": [{"api_key": "x"}]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--api-key", "x"], ["--api-key", REDACTED]),
        (["--api-key=x"], [f"--api-key={REDACTED}"]),
        (["--password=two words"], [f"--password={REDACTED}"]),
        (["--api-key", "-x-y"], ["--api-key", REDACTED]),
        (["--secret", "--lr", "1"], ["--secret", "--lr", "1"]),
        (["--use-auth-token", "True"], ["--use-auth-token", "True"]),
        (["model.hub.token=x", "lr=1"], [f"model.hub.token={REDACTED}", "lr=1"]),
        (["+api_key=x"], [f"+api_key={REDACTED}"]),
        ([GITHUB], [REDACTED]),
        (["train.py", "--num-tokens", "512"], ["train.py", "--num-tokens", "512"]),
        ([], []),
    ],
)
def test_a_command_line_loses_its_secrets(arguments, expected):
    """A secret may be in one argument or in two, with dashes or as an override."""
    assert redact_arguments(arguments) == expected


@pytest.mark.parametrize(
    "text",
    [*SECRETS.values(), "password='a b'", "token=abc&x=1", "Authorization: Bearer abc", "https://a:b@c/"],
)
def test_redacting_twice_is_redacting_once(text):
    """The replacement isn't taken for a secret again."""
    once = redact_text(text)

    assert redact_text(once) == once
