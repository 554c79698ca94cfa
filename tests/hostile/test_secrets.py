"""Secrets in unexpected places, and words that only look like secrets."""

import re
import subprocess
import sys
import textwrap

import pytest

from destinations import InMemory, RunDirectory, TextFile
from destinations.run_directory.environment import describe_environment
from events import Logger, Run, State, redact, redact_arguments, redact_text
from uploads import redaction

# Invented, and assembled from parts, so that no scanner reports them as real ones.
LOW, UP, MIX, HEX = "abcdefghij", "ABCDEFGHIJ", "aB3dE6gH9k", "0a1b2c3d4e"
WORD = "hunter" + "2"


def body(letters, length):
    """Returns that many letters."""
    return (letters * (length // len(letters) + 1))[:length]


BY_FORMAT = [
    *(
        prefix + body("ABCDEFGH12345678", 16)
        for prefix in ("AK" + "IA", "AS" + "IA", "AB" + "IA", "AC" + "CA")
    ),
    *("gh" + kind + "_" + body(MIX, 36) for kind in "pousr"),
    "github" + "_pat_" + body(MIX, 82),
    *("gl" + kind + "-" + body(MIX, 20) for kind in ("pat", "dt", "ft", "rt", "soat")),
    "hf" + "_" + body("aBcDeFgHiJ", 34),
    "api" + "_org_" + body("aBcDeFgHiJ", 34),
    *("sk-" + kind + body(MIX, 48) for kind in ("", "proj-", "ant-" + "api03-", "svcacct-", "or-v1-")),
    "sk-" + body(HEX, 32),
    *(kind + "_" + mode + "_" + body(MIX, 24) for kind in ("sk", "rk") for mode in ("live", "test")),
    "wh" + "sec_" + body(MIX, 32),
    "AI" + "za" + body(MIX, 35),
    "ya" + "29." + body(MIX, 60),
    "GOC" + "SPX-" + body(MIX, 28),
    "gsk" + "_" + body(MIX, 52),
    "r8" + "_" + body(MIX, 37),
    "pplx" + "-" + body(MIX, 48),
    "xai" + "-" + body(MIX, 80),
    "nvapi" + "-" + body(MIX, 64),
    "pcsk" + "_" + body(MIX, 60),
    "lsv2" + "_pt_" + body(HEX, 32) + "_" + body(HEX, 10),
    "tvly" + "-" + body(MIX, 32),
    "wandb" + "_v1_" + body(MIX, 40),
    "da" + "pi" + body(HEX, 32),
    *("xox" + kind + "-" + "1234567890-" + body(MIX, 24) for kind in "abpr"),
    "xa" + "pp-1-" + body(UP, 11) + "-1234567890",
    "np" + "m_" + body(MIX, 36),
    "pypi" + "-AgE" + body(MIX, 60),
    "ruby" + "gems_" + body(HEX, 48),
    "dckr" + "_pat_" + body(MIX, 27),
    "dop" + "_v1_" + body(HEX, 64),
    "hv" + "s." + body(MIX, 90),
    "gl" + "sa_" + body(MIX, 32) + "_" + body(HEX, 8),
    "lin" + "_api_" + body(MIX, 40),
    "shp" + "at_" + body(HEX, 32),
    "AT" + "ATT3" + body(MIX, 100),
    "SG" + "." + body(MIX, 22) + "." + body(MIX, 43),
    "pul" + "-" + body(HEX, 40),
    "key" + "-" + body(HEX, 32),
    "AGE-" + "SECRET-KEY-1" + body("QPZRY9X8GF", 58),
    "LT" + "AI" + body(MIX, 20),
    body(MIX, 3) + "8" + "Q~" + body(MIX, 33),
    body(MIX, 14) + ".atlas" + "v1." + body(MIX, 64),
    "123456789" + ":AA" + body(MIX, 33),
    "ey" + "J" + body(MIX, 20) + ".ey" + "J" + body(MIX, 30) + "." + body(MIX, 43),
    "sk-ant-" + "abcd" * 20,
    "sk-ant-" + "api03-" + "a-" * 47 + "AA",
    "sk-" + "a" * 48,
    "https://hooks.slack" + ".com/services/T000/B000/" + body(MIX, 24),
    "https://discord" + ".com/api/webhooks/123456/" + body(MIX, 60),
]
FRAMES = ["{}", "token is {} here", 'use "{}"', "\nline\\n{}", "error: 401 for {}, try again", "x={};y"]

NAMES = [
    *(
        "password",
        "PASSWORD",
        "db_password",
        "DB_PASS",
        "PGPASSWORD",
        "SMTP_PASS",
        "rootpassword",
        "user.passwd",
    ),
    *("secret", "client_secret", "clientSecret", "AWS_SECRET_ACCESS_KEY", "JWT_SECRET", "app.secret_key"),
    *(
        "api_key",
        "apiKey",
        "X-Api-Key",
        "OPENAI_API_KEY",
        "OPENAI_KEY",
        "ANTHROPIC_KEY",
        "WANDB_KEY",
        "OpenAIKey",
    ),
    *(
        "token",
        "hf_token",
        "HF_TOKEN",
        "GITHUB_TOKEN",
        "accessToken",
        "refresh-token",
        "slack_bot_token",
        "NPM_TOKEN",
    ),
    *("private_key", "ssh_key", "signing_key", "master_key", "account_key", "AccountKey", "SharedAccessKey"),
    *("credentials", "creds", "passphrase", "mysql_pwd", "azure_storage_account_key", "sse_customer_key"),
    *("connection_string", "license_key", "GH_PAT", "admin_pass", "webhook_key", "encryption_key"),
]
SYNTAX = [
    "{}:{}",
    "{}: {}",
    "{} = '{}'",
    'os.environ["{}"] = "{}"',
    '{{"{}": "{}", "lr": 1}}',
    'the answer was \\"{}\\": \\"{}\\".',
    "python train.py --{} {} --lr 1",
    "export {}={}",
    "{} => {},",
    "def f({}: str = '{}'):",
]
PLACES = [
    *(
        f"{scheme}://jo:{WORD}@db:5432/x"
        for scheme in ("postgres", "mysql", "redis", "https", "s3", "amqp", "sftp")
    ),
    f"redis://:{WORD}@cache",
    f"https://{body(MIX, 20)}@github.com/a/b.git",
    f"https://{WORD}@host/path",
    f"https://{body(HEX, 32)}@o1.ingest.sentry.io/1",
    f"GET /x?token={WORD}&a=1",
    f"https://b.s3.amazonaws.com/k?X-Amz-Signature={body(HEX, 64)}&x=1",
    f"https://b.s3.amazonaws.com/k?X-Amz-Credential={WORD}&x=1",
    f"https://a.blob.core.windows.net/c?sv=1&sig={WORD}%3D",
    f"https://maps.example.com/?api_key={WORD}",
    f"https://x.example.com/?access_token={WORD}#top",
    f"Authorization: Bearer {WORD}",
    f"Authorization: Basic {body(MIX, 20)}==",
    f"curl -H 'Authorization: token {WORD}' https://x",
    f"sent Bearer {body(MIX, 24)}",
    f"Cookie: session={WORD}",
    f"curl -u jo:{WORD} https://x",
    f"sshpass -p {WORD} ssh host",
    f"mysql -u root -p{WORD} db",
    f"docker login -u jo -p {WORD} registry",
    f"<password>{WORD}</password>",
    f"<apiKey>{WORD}</apiKey>",
    "-----BEGIN RSA " + f"PRIVATE KEY-----\n{WORD}\n-----END RSA " + "PRIVATE KEY-----",
    '{"key": "-----BEGIN ' + f"PRIVATE KEY-----\\n{WORD}\\n-----END " + 'PRIVATE KEY-----"}',
    f"Endpoint=sb://x/;SharedAccessKeyName=Root;SharedAccessKey={WORD}=",
    f"DefaultEndpointsProtocol=https;AccountName=x;AccountKey={WORD}==;EndpointSuffix=y",
    f"machine api.wandb.ai login user password: {WORD}",
    f"['--api-key', '--password={WORD}']",
    f"ValueError: password={WORD} is wrong",
    f"api_keys = ['{WORD}', 'other']",
    f"api key: {WORD}",
    f"Secret Key = {WORD}",
    f'"api key": "{WORD}"',
    f"--auth {WORD} --lr 1",
    f'{{"auths": {{"https://x/v1/": {{"auth": "{body(MIX, 20)}"}}}}}}',
    f'{{"api": {{"key": "{WORD}"}}}}',
    f"api:\n  key: {WORD}\n",
    f"wandb.api.key={WORD}",
    f'{{"username": "jo", "key": "{body(HEX, 32)}"}}',
    f"machine x login me password {WORD}",
    f"//registry.npmjs.org/:_authToken={WORD}",
    f"7z a -p{WORD} x.7z",
    f"https://{body(MIX, 20)}:x-oauth-basic@github.com/a",
]


def _secret_texts():
    """Yields each text with the secret in it."""
    for number, secret in enumerate(BY_FORMAT):
        yield FRAMES[number % len(FRAMES)].format(secret), secret
    for number, name in enumerate(NAMES * 2):
        value = WORD if number % 2 else body(MIX, 24)
        yield SYNTAX[number % len(SYNTAX)].format(name, value), value
    for place in PLACES:
        yield place, max((one for one in (WORD, body(MIX, 20), body(HEX, 32)) if one in place), key=len)


SECRET_TEXTS = list(_secret_texts())

HARMLESS_NAMES = {
    **dict.fromkeys(
        ["num_tokens", "max_tokens", "tokens", "tokens_per_second", "context_tokens", "total_tokens"], 4096
    ),
    **dict.fromkeys(["query_token", "target_token", "pad_token", "image_token", "user_end_token"], "alpha"),
    **dict.fromkeys(["bos_token", "eos_token", "sep_token", "cls_token", "mask_token", "unk_token"], "<s>"),
    **dict.fromkeys(
        ["source_token", "tgt_token", "register_token", "latent_token", "draft_token"], "learned"
    ),
    **dict.fromkeys(["secret_dim", "secret_size", "password_length", "num_secrets", "token_dim"], 64),
    **dict.fromkeys(["tokenizer", "tokenizer_name", "tokenization", "detokenizer", "token_type"], "gpt2"),
    **dict.fromkeys(
        ["primary_key", "foreign_key", "sort_key", "group_key", "cache_key", "public_key"], "user"
    ),
    **dict.fromkeys(["key", "keys", "key_dim", "key_proj", "num_key_value_heads", "keypoints"], 8),
    **dict.fromkeys(["forward_pass", "first_pass", "num_passes", "bandpass", "low_pass", "two_pass"], 3),
    **dict.fromkeys(["password_file", "credentials_path", "token_path", "secret_name", "token_url"], "a/b"),
    **dict.fromkeys(
        ["api_key_env", "password_policy", "secret_provider", "token_mixer", "token_pooling"], "mean"
    ),
    **dict.fromkeys(["monkey", "keyboard", "turkey", "compass", "passenger", "bypass"], "north"),
    **dict.fromkeys(["secretary", "author", "authority", "authors", "passage", "passport_country"], "jo"),
    **dict.fromkeys(["author_key", "metric_key", "image_key", "label_key", "dict_key", "state_key"], "loss"),
    **dict.fromkeys(["pin_memory", "signature_type", "session", "cookie_cutter", "license", "access"], "x"),
    **dict.fromkeys(["lr", "seed", "dropout", "weight_decay", "warmup", "epochs"], 1e-3),
}
HARMLESS_TEXTS = [
    *(f"{name}={value}" for name, value in HARMLESS_NAMES.items()),
    *(f'"{name}": {value!r},' for name, value in list(HARMLESS_NAMES.items())[::2]),
    *("password: str", "token: str | None = None", "def login(password: str, token: bytes) -> None:"),
    *("api_key=None", "token=True", "use_auth_token=False", "password=''", 'secret=""', "password: required"),
    *(
        "password=${DB_PASS}",
        "token=$HF_TOKEN",
        "api_key={{ api_key }}",
        "password=***",
        "token=<your token>",
    ),
    *(
        "token=self.token",
        "api_key=args.api_key",
        "token = get_token(1)",
        "password=password",
        'os.environ["HF_TOKEN"]',
    ),
    *(
        "token=[MASK]",
        "token: 17",
        "token=</s>",
        "the token is wrong",
        "a secret between friends",
        "key: value",
    ),
    *(
        "https://example.com:8080/a?b=c&d=e",
        "s3://bucket/key",
        "git@github.com:a/b.git",
        "ssh://git@github.com/a/b",
    ),
    *("https://jo@github.com/a/b.git", "postgres://jo@db/x", "http://[::1]:9000/x", "file:///tmp/x@y"),
    *(
        "https://medium.com/@jo/x",
        "https://cdn.example.com/npm/x@1.2/y.js",
        "see http://host/x, then a@b.com",
    ),
    *("jo@example.com", "2026-01-01T12:00:00Z", "12:30:45", "a::b::c", "x[1:2]", "std::string token"),
    *(
        "0123456789abcdef0123456789abcdef01234567",
        "123e4567-e89b-12d3-a456-426614174000",
        "sha256:" + body(HEX, 64),
    ),
    *(
        "sk-learn-pipeline-for-digits-version-2",
        "task-12345678901234567890",
        "hf_hub_download",
        "disk-usage-of-all-runs-1",
    ),
    *(
        "PASS: test_a",
        "pass",
        "passes all tests",
        "3 passed, 1 failed",
        "bearer of good news",
        "basic understanding-of-things",
    ),
    *(
        "mkdir -p a/b",
        "docker run -p 8080:80 x",
        "ps -p 123",
        "curl -s https://x",
        "mysql -u root db",
        "--port 80",
    ),
    *(
        "Traceback (most recent call last):",
        "KeyError: 'loss'",
        "KeyError: 'token'",
        "tokens: 100%|####| 3/3",
    ),
    *(
        "loss=0.1 acc=0.9",
        "eyJ",
        "Signature: (x: int) -> int",
        "<key>name</key>",
        "<p>token</p>",
        "A key: a door",
    ),
    *("C:\\Users\\jo\\keys", "/home/jo/.ssh/config", "layers.0.attention.key.weight", "model.tokenizer.pad"),
    *("PWD=/home/jo", "GOOGLE_APPLICATION_CREDENTIALS=/etc/gcp.json", "a=1&b=2", "x ? y : z", "secrets: 3"),
    *(
        "token_embedding.weight",
        "class_token=zeros",
        "-----BEGIN CERTIFICATE-----",
        "-----",
        "=====",
        "",
        " ",
    ),
    *(
        "vocab[token] = index",
        'headers={"Authorization": "Bearer ..."}',
        "embedding of 'password'",
        "the API key was not accepted",
        "a key: a door",
        "sort key: loss",
        "cache key: abc",
        "dict key: loss",
        "shared.key=64",
        "attention.key=linear",
        "auth: failed",
        "auth=basic",
        "--auth basic",
        "reauth: jo logged in",
        "author=jo",
        "requests.get(url, auth=(user, word))",
        "sk-ant-colony-optimization",
        "sk-bert-base-uncased-finetuned-sst2-english",
        "Invalid token",
        "token limit reached: 4096",
    ),
]


def test_the_corpus_has_its_minimum_size():
    """The corpus has at least two hundred of each, without duplicates."""
    assert len({text for text, _ in SECRET_TEXTS}) >= 200
    assert len(set(HARMLESS_TEXTS)) >= 200


def test_secrets_in_texts_are_redacted():
    """At least 98 of 100 leave no fragment of eight letters."""
    missed = []
    for text, secret in SECRET_TEXTS:
        redacted = redact_text(text)
        if any(secret[at : at + 8] in redacted for at in range(max(1, len(secret) - 7))):
            missed.append((text, redacted))

    assert len(missed) <= 0.02 * len(SECRET_TEXTS), missed


def test_harmless_texts_are_unchanged():
    """At least 98 of 100 are unchanged."""
    destroyed = [(text, redact_text(text)) for text in HARMLESS_TEXTS if redact_text(text) != text]

    assert len(destroyed) <= 0.02 * len(HARMLESS_TEXTS), destroyed


def test_secrets_in_structures_are_redacted():
    """A key's name identifies a secret at any depth; in a command line, the option's name does."""
    missed = [
        name
        for name in NAMES
        if WORD in str(redact({"a": [{name: WORD}], name: {"b": [WORD]}}))
        or WORD in str(redact_arguments([f"--{name}", WORD, f"--{name}={WORD}"]))
    ]

    assert missed == []


def test_harmless_names_in_structures_are_unchanged():
    """They are kept, as in texts."""
    assert redact(HARMLESS_NAMES) == HARMLESS_NAMES


def test_a_key_that_is_a_secret_is_hidden_and_its_value_is_kept():
    """Two such keys stay two keys."""
    first, second = "hf" + "_" + body("aBcDeFgHiJ", 34), "hf" + "_" + body("KlMnOpQrSt", 34)

    assert redact({first: 1, second: {"x": 2}, "lr": 3}) == {
        "[redacted]": 1,
        "[redacted] 2": {"x": 2},
        "lr": 3,
    }


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-p", WORD], ["-p", "[redacted]"]),
        (["-p", "8080", "-p", "a/b", "-p"], ["-p", "8080", "-p", "a/b", "-p"]),
        (["--header", f"X-Api-Key: {WORD}"], ["--header", "X-Api-Key: [redacted]"]),
        (["--config", f'{{"password": "{WORD}"}}'], ["--config", '{"password": "[redacted]"}']),
        (["--auth", WORD], ["--auth", "[redacted]"]),
        (["--auth", "basic", "--auth=none"], ["--auth", "basic", "--auth=none"]),
        (["train.py", f"-p{WORD}"], ["train.py", "-p[redacted]"]),
        (
            ["-p8080", "-p8080:80", "-patience", "-patience=5"],
            ["-p8080", "-p8080:80", "-patience", "-patience=5"],
        ),
        (["-precision", "bf16", "-profile"], ["-precision", "bf16", "-profile"]),
        (["mkdir", "-p", "runs"], ["mkdir", "-p", "runs"]),
        (["-H", f"Authorization: Bearer {WORD}"], ["-H", "Authorization: [redacted]"]),
        (
            ["--set", f"api.key={WORD}", f"-DapiKey={WORD}"],
            ["--set", "api.key=[redacted]", "-DapiKey=[redacted]"],
        ),
    ],
)
def test_a_short_option_hides_its_value(arguments, expected):
    """`-p` may be a password; a number or a path is kept."""
    assert redact_arguments(arguments) == expected
    assert redact({"argv": arguments}) == {"argv": expected}


@pytest.mark.parametrize(
    "value",
    [
        {"api": {"key": WORD}},
        {"api": [{"key": WORD}]},
        {"wandb": {"api": {"key": WORD}}},
        {"openai": {"key": WORD}},
        {"api.key": WORD},
        {"auth": WORD},
        {"auth": ("me", WORD)},
        {"auth": {"value": WORD}},
        {"auths": {"https://x/": {"auth": WORD}}},
        {"name": "api_key", "value": WORD},
        {"env": [{"name": "HF_TOKEN", "value": WORD}]},
        {"username": "jo", "key": WORD},
        [["api_key", WORD], ["lr", "0.1"]],
        (("password", WORD),),
        {"headers": [("Authorization", f"Bearer {WORD}")]},
    ],
    ids=str,
)
def test_a_name_in_parts_hides_its_value(value):
    """A name may be split over levels, or be next to its value in a pair or an entry."""
    shown = redact(value)

    assert WORD not in str(shown)
    assert type(shown) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        {
            "sort": {"key": "loss"},
            "data": {"key": "image"},
            "attention": {"key": "linear", "value": "linear"},
        },
        {"shared": {"key": 64}, "api": {"key": 3, "url": "x", "version": "2"}, "key": {"value": "a"}},
        {"auth": {"type": "basic", "url": "x"}, "auth_type": "basic"},
        {"auth": "none"},
        {"name": "num_tokens", "value": 4096},
        {"name": "tokenizer", "value": "gpt2"},
        {"name": "loss", "value": 0.5},
        [["lr", "0.1"], ["tokenizer", "gpt2"], ["num_tokens", "5"]],
        [["token", "embedding"], ["pass", "word"]],
        ["password", "secret", "key"],
        ["api_key", "lr"],
    ],
    ids=str,
)
def test_parts_of_harmless_names_hide_nothing(value):
    """Attention keys, sort keys, words of a text and token counts are shown."""
    assert redact(value) == value


def test_a_structure_that_contains_itself_is_cut_off():
    """Redaction stops at a maximum depth."""
    endless = {"password": WORD}
    endless["again"] = [endless]

    redacted = redact(endless)

    assert WORD not in str(redacted)
    assert "[nested too deeply]" in str(redacted)


# Each of these made a pattern restart at each letter.
ADVERSARIAL = [
    *(
        "a",
        "=",
        "a.",
        "a-",
        "-----BEGIN ",
        "-----BEGIN PRIVATE KEY-----",
        "https://",
        "https://a",
        "://a:",
        "://@",
    ),
    *(
        "key:",
        "key: ",
        "token=",
        'token="',
        "token='\\",
        "token=[ ",
        "token=(",
        'password:\\"',
        "'token'] =",
        "token===",
    ),
    *(
        "eyJ",
        "sk-",
        "sk-a",
        "ghp_",
        "xox",
        "1:AA",
        "hf_",
        "Q~",
        "?token=",
        "a=b&",
        "Bearer ",
        "--token ",
        "-token ",
    ),
    *("<password>", "mysql -u ", "curl -u ", "secret", "_token", "token:", "\n", "0", "passwordpassword "),
]


@pytest.mark.parametrize("seed", ADVERSARIAL)
def test_a_long_text_is_searched_in_linear_time(seed):
    """It takes a moment; a quadratic search would take minutes."""
    redacted = redact_text(seed * (200_000 // len(seed)))

    assert redacted


def _calls_of(text):
    """Returns the number of calls of Python functions, and of the C functions that they call."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in {"call", "c_call"}

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        redact_text(text)
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("seed", ADVERSARIAL)
def test_the_number_of_calls_is_linear_in_the_text(seed):
    """The work for each finding doesn't depend on their number."""
    once, twice = _calls_of(seed * 500), _calls_of(seed * 1000)

    assert twice <= 2 * once + 50


def _repetitions(parsed):
    """Yields the kind and upper bound of each repetition in a parsed pattern."""
    parser, constants = re._parser, re._constants
    for code, argument in parsed:
        if code in {constants.MAX_REPEAT, constants.MIN_REPEAT, constants.POSSESSIVE_REPEAT}:
            yield code is constants.POSSESSIVE_REPEAT, argument[1]
        for inner in argument if isinstance(argument, list | tuple) else ():
            for one in inner if isinstance(inner, list | tuple) else (inner,):
                if isinstance(one, parser.SubPattern):
                    yield from _repetitions(one)


def test_unbounded_repetitions_are_possessive():
    """A possessive repetition is never retried in a shorter form."""
    module = vars(redaction)
    patterns = [value for value in module.values() if isinstance(value, re.Pattern)]
    patterns += [step[1] for step in (*module["_FORMAT_STEPS"], *module["_PLACE_STEPS"])] + list(
        module["_QUOTED"].values()
    )

    # These match only texts of bounded length, or end in a single character class.
    short = {"_PLACEHOLDER", "_CODE", "_NUMBER", "_SPECIAL_TOKEN", "_FILE_PATH", "_USER_NAME", "_WORD"}
    searched = [one for one in patterns if one not in [module[name] for name in short]]
    endless = [
        pattern.pattern
        for pattern in searched
        for is_possessive, bound in _repetitions(re._parser.parse(pattern.pattern, pattern.flags))
        if bound is re._constants.MAXREPEAT and not is_possessive
    ]

    assert endless == []


SECRET = "hf" + "_" + body("aBcDeFgHiJ", 34)


def test_no_record_reaches_a_destination_with_a_secret():
    """Texts, tables, traces, hyperparameters and labels are redacted at any depth, keys as well as values."""
    destination = InMemory()
    logger = Logger(State("mine"), destination)

    logger.log_text(f"the token is {SECRET}", name="note")
    logger.log_table(
        ["name", "api_key", "token"], [["jo", WORD, "the"], [f"x {SECRET}", None, "cat"]], name="people"
    )
    logger.log_traces({"answer": {"headers": [f"Authorization: Bearer {WORD}"], SECRET: {"password": WORD}}})
    logger.log_hyperparameters({"hub": {"token": WORD, SECRET: 1}, "url": f"https://jo:{WORD}@host/x"})

    kept = [record.value for record in destination.records]
    assert len(kept) == 4
    assert WORD not in str(kept)
    assert SECRET not in str(kept)
    assert destination.tables["people"][0].rows == [
        ["jo", "[redacted]", "the"],
        ["x [redacted]", None, "cat"],
    ]


def test_no_file_of_a_run_has_a_secret(tmp_path):
    """Tags, notes, captions, errors with their tracebacks, and the program's output are redacted."""
    run_dir = tmp_path / "run"
    destinations = [
        RunDirectory(run_dir, tags=[f"token={WORD}"], notes=f"see https://jo:{WORD}@host"),
        TextFile(tmp_path / "log.txt", capture_stdout=True),
    ]

    def train():
        with Run(destinations, run_name="mine") as run:
            print(f"password: {WORD}")
            run.logger.log_text(SECRET)
            raise ValueError(f"password={WORD}")

    with pytest.raises(ValueError, match=WORD):
        train()

    texts = {path.name: path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()}
    assert "[redacted]" in texts["sidecar.json"]
    assert "password: [redacted]" in texts["log.txt"]
    assert [name for name, text in texts.items() if WORD in text or SECRET in text] == []


def test_a_large_diff_is_measured_without_searching_it(tmp_path, monkeypatch):
    """Its size is exact, because it's neither searched nor decoded."""
    monkeypatch.chdir(tmp_path)
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", *identity, *command], check=True)
    (tmp_path / "a.txt").write_bytes(b"password=hunter2 \xff\n" * 100_000)
    subprocess.run(["git", "add", "a.txt"], check=True)
    diff = subprocess.run(["git", "diff", "HEAD"], check=True, capture_output=True).stdout

    described = describe_environment({"rank": 0})

    assert len(diff) > 1_800_000
    assert described["git"]["diff_bytes"] == len(diff)


def test_an_environment_without_a_working_directory_is_described(tmp_path, monkeypatch):
    """Values that can't be determined are None; the others are there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    described = describe_environment({"rank": 0})

    assert described["working_directory"] is None
    assert described["host"]


def test_errors_are_redacted_without_a_free_file_descriptor():
    """The logger's constructor imports the rules; when a destination fails, no file can be opened."""
    program = """
        import resource, sys
        from events import Logger, State
        from destinations import Functions

        def fail(*arguments):
            raise OSError("no file for password=hunter2")

        state = State("mine")
        logger = Logger(state, Functions(log_metrics=fail))
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        logger.log_metrics({"loss": 1.0})
    """

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    assert "password=[redacted]" in result.stderr
    assert WORD not in result.stderr
