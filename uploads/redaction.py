r"""Removes secrets from values and texts before they reach a log, a file, a store or a tracker.

A secret is known by its name (`api_key=…`), by its format (a prefix and a length, as GitHub's or AWS's), or
by its place (`https://user:password@host`). Names that only sound like one (`num_tokens`, `pad_token`,
`secret_dim`) are left alone.

The time is linear in the length of any text: unbounded repetitions are possessive, and a match can't begin
inside text that the one before has looked at. A text without any of the literals isn't searched by patterns.
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, overload

__all__ = [
    "REDACTED",
    "is_secret_name",
    "redact",
    "redact_arguments",
    "redact_table",
    "redact_text",
]

REDACTED = "[redacted]"

_MAX_DEPTH = 100
_MAX_NAME_LENGTH = 200
_MAX_HARMLESS_LENGTH = 200
_NUMBERS = frozenset({float, int, bool, type(None)})
_MIN_LENGTH = 12
"""A shorter text without an assignment can't contain a recognizable secret."""

# Names.


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# A name is split into words at separators and humps, and the words are compared, so that `num_tokens` doesn't
# count as `token`.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\dA-Z_]+|\d+")
_SECRET_WORDS = _words(
    "password passwords passwd pwd passphrase passphrases passcode secret secrets credential"
    " credentials creds authorization passwort kennwort contraseña contrasena jwt"
)
# Ends of compound words: `dbpassword`, `apikey`.
_SECRET_ENDS = (
    *("password", "passwd", "passphrase", "clientsecret", "apikey", "apikeys", "secretkey", "accesskey"),
    *("privatekey", "accountkey", "authkey", "authtoken", "accesstoken", "apitoken", "connectionstring"),
)
_SECRET_PAIRS = {
    *(("connection", "string"), ("conn", "str"), ("seed", "phrase"), ("recovery", "phrase")),
    ("recovery", "code"),
}
_SECRET_NAMES = frozenset({"cookie", "set-cookie", "pgpass"})
# Words that make a key a secret if they stand right before "key".
_KEYS_OF = _words(
    "api access private priv secret auth account encryption encrypt decryption signing ssh service"
    " master app application subscription license licence deploy hmac shared admin consumer client db"
    " database rsa aes gpg pgp jwt webhook sas authorization customer"
)
# Words that do so even with a space, a dot or a level of nesting in between: `api key: …`.
_NESTED_KEYS_OF = _words(
    "api access private secret auth account encryption decryption signing ssh license subscription hmac"
)
_VENDORS = _words(
    "openai anthropic claude wandb huggingface hf aws azure gcp google github gh gitlab comet neptune"
    " cohere mistral groq gemini deepseek replicate together pinecone langchain langsmith serpapi"
    " stripe twilio sendgrid mailgun datadog dd kaggle elevenlabs perplexity fireworks openrouter xai"
    " nvidia ngc clearml dagshub roboflow weaviate qdrant algolia slack discord telegram tavily vault"
    " mlflow lambdalabs runpod vastai modal cloudflare digitalocean linode heroku newrelic grafana"
    " sentry pagerduty opsgenie zilliz milvus voyage voyageai jina assemblyai deepgram stability"
    " alibaba"
)
_LONG_VENDORS = tuple(sorted(vendor for vendor in _VENDORS if len(vendor) >= 5))  # noqa: PLR2004
# Last words of names that describe a secret but aren't one: `password_length`, `secret_dim`, `token_url`.
_ABOUT = _words(
    "dim dims size sizes len length lengths count counts num number ratio rate weight weights loss"
    " losses dropout prob layer layers head heads file files filename path paths dir directory folder"
    " name names type types kind mode format policy strategy required enabled disabled env var"
    " variable provider manager store backend method scheme version field fields column columns prompt"
    " hint rotation expiry expires expiration ttl timeout min max url uri endpoint norm scale std mean"
)
_COUNTS = _words("num n max min total mean avg len count")
# Words about a vocabulary or a count, not about access: `pad_token`, `query_token`, `max_token`.
_VOCABULARY = _words(
    "pad padding eos bos sos eot eod eom eol eof sot unk unknown oov mask masked cls sep separator"
    " delimiter delim special additional extra unused reserved start end stop begin prefix suffix"
    " infix prompt image text audio video speech mel codec frame pixel patch region object visual"
    " vision latent first last next previous prev new current blank null empty dummy boundary"
    " placeholder class classification regression distill distillation dist readout learned num max"
    " min per total mean avg in query target source src tgt input output context word subword char"
    " character byte sentence segment paragraph register entity relation label task language lang"
    " style time timestep position pos speaker action reward return goal observation obs memory"
    " summary draft assistant think thinking reasoning node edge graph global local fill filler header"
    " chat role turn sample sampled generated gen random noise sink anchor control modality tag"
    " trigger keyword newline space whitespace rare frequent phoneme silence motion depth pose top"
    " best longest shortest average code lora soft hard virtual meta pooled rank router expert"
)
_ACCESS = _words("api auth access refresh bearer session")
# Words before `auth` (which is also a secret by itself), as `--auth`, npm and Docker use it.
_AUTH_OF = _words("http https basic proxy bearer digest registry npm docker")
_AUTH_KINDS = _words(
    "basic digest bearer token oauth oauth2 ntlm kerberos negotiate ldap saml sso iam jwt password key"
    " api-key api_key apikey default auto anonymous ok failed success always never"
)
_WORDS_OF_TEXTS = _words("token pass pw")
# Words before `pass` that make it a password, unlike `forward_pass`.
_PASS_OF = _words(
    "db database user usr admin root smtp mail email imap ftp sftp ssh mysql pg postgres postgresql"
    " redis mongo mongodb rabbitmq mqtt ldap auth login proxy http basic api app service svc sudo my"
    " wifi vpn elastic clickhouse sql jdbc keystore truststore key cert ssl git docker registry kafka"
    " nexus jenkins"
)


def is_secret_name(name: object) -> bool:
    """Returns whether a name belongs to a secret.

    Only the last part of a dotted name counts, and for a "key" the part before: `api.key`.
    """
    return isinstance(name, str) and _is_secret_name(name[-_MAX_NAME_LENGTH:])


@functools.lru_cache(4096)
def _is_secret_name(name: str) -> bool:
    parts = name.strip("-+~ ").split(".")
    if len(parts) > 1 and parts[-1].lower() in {"key", "keys"}:
        return _is_key_of(parts[-2])
    name = parts[-1].strip("-+~ ")
    words = [word.lower() for word in _WORD.findall(name)]
    named = [word for word in words if not word.isdigit()]
    if not named:
        return False
    last, before = named[-1], set(named[:-1])
    if last == "token":
        return _VOCABULARY.isdisjoint(before)
    if last == "tokens":
        return not _ACCESS.isdisjoint(before)
    if last in _ABOUT or named[0] in _COUNTS:
        return False
    if last == "auth":
        return len(named) == 1 or named[-2] in _AUTH_OF
    if last in {"pass", "pw"}:
        return len(named) == 1 or named[-2] in _PASS_OF or not before.isdisjoint(_VENDORS) or name.isupper()
    if last in {"key", "keys", "pat"} and (
        not before.isdisjoint(_VENDORS) or "".join(named[:-1]).endswith(_LONG_VENDORS)
    ):
        return True
    return (
        name.lower() in _SECRET_NAMES
        or not _SECRET_WORDS.isdisjoint(named)
        or any(word.endswith(_SECRET_ENDS) for word in named)
        or any(
            pair in _SECRET_PAIRS or (pair[1] in {"key", "keys"} and pair[0] in _KEYS_OF)
            for pair in itertools.pairwise(named)
        )
    )


def _is_key_of(parent: str) -> bool:
    """Returns whether a "key" of this, one level or one space apart, grants access."""
    words = [word.lower() for word in _WORD.findall(parent)]
    return bool(words) and (words[-1] in _NESTED_KEYS_OF or words[-1] in _VENDORS)


# Harmless values under a secret's name.

_NO_VALUES = _words(
    "true false none null nil undefined yes no on off required optional missing invalid expired"
    " incorrect wrong unset empty hidden unknown str string int float bool bytes any secretstr"
    " redacted"
)
_PLACEHOLDER = re.compile(
    r"\[redacted\].*|<redacted>.*|<[^<>]{0,60}>|\*+|[xX]{3,}|(?:\w{1,10} )?(?:\.{2,}|…)"
    r"|\$[A-Z][A-Z0-9_]*|\$?\{[^{}]{0,60}\}|\$?\{\{[^{}]{0,60}\}\}|%\w+%"
)
# Code without quotes: an attribute, an item, a call, a type.
_CODE = re.compile(
    r"(?:self|cls|args?|cfg|config|conf|settings|opts?|options|hparams|params|env|os|kwargs"
    r"|Optional|Union|list|dict|tuple|typing)[.\[].*|[^\W\d][\w.]*\(.*",
    re.DOTALL,
)
_NUMBER = re.compile(r"[\d_.e+-]{1,12}")
_SPECIAL_TOKEN = re.compile(r"<.{0,40}>|\[[A-Z_0-9]{0,40}\]|\W{1,3}", re.DOTALL)
_FILE_PATH = re.compile(r"(?:~|\.{0,2})/[\w./ -]+|[\w./ -]+\.(?:json|ya?ml|toml|ini|txt|pem|cfg|env)")


def _is_harmless(name: str, value: object) -> bool:
    """Returns whether a value can't be a secret: empty, a switch, a placeholder, a number of tokens."""
    match value:
        case None | bool():
            return True
        case Mapping() if _is_auth(name):
            return True  # It names a method; its items are checked by their own names.
        case bytes() | Mapping() | list() | tuple() | set() | frozenset():
            return not value
        case int() | float() if name.lower().endswith((".key", ".keys")):
            return True
    text = str(value)
    if len(text) > _MAX_HARMLESS_LENGTH:
        return False
    if not text or text.lower() in _NO_VALUES or _PLACEHOLDER.fullmatch(text):
        return True
    if _is_auth(name) and text.lower() in _AUTH_KINDS:
        return True
    name = name.lower()
    if "token" in name and (_NUMBER.fullmatch(text) or _SPECIAL_TOKEN.fullmatch(text)):
        return True
    if name.endswith("s") and text.isdecimal() and len(text) < 5:  # noqa: PLR2004  # how many there are
        return True
    return name.endswith(("credentials", "credential", "pwd", "creds")) and bool(_FILE_PATH.fullmatch(text))


def _is_auth(name: str) -> bool:
    return name.lower().endswith("auth")


# Formats.

_LETTERS = r"[A-Za-z0-9]"
# Documented prefixes of secrets, and a pattern for the rest.
_FORMATS = {
    "AKIA ASIA ABIA ACCA AROA AIDA": r"[A-Z0-9]{16}(?![A-Za-z0-9])",  # AWS
    "LTAI": rf"{_LETTERS}{{20,}}+",  # Alibaba
    "AIza": r"[\w-]{35,}+",  # Google
    "ya29. GOCSPX-": r"[\w-]{20,}+",
    "ghp_ gho_ ghu_ ghs_ ghr_": rf"{_LETTERS}{{36,}}+",  # GitHub
    "github_pat_": r"\w{22,}+",
    # GitLab
    "glpat- gldt- glft- glrt- glptt- glcbt- glsoat- glagent- gloas- glimt- glffct-": r"[\w.-]{20,}+",
    "hf_ api_org_": rf"{_LETTERS}{{30,}}+",  # Hugging Face
    # Anthropic, OpenAI, OpenRouter
    "sk-ant- sk-proj- sk-svcacct- sk-admin- sk-or-v1-": r"[\w-]{32,}+",
    # OpenAI and others; a name of a run has shorter words.
    "sk-": rf"(?:{_LETTERS}{{32,}}+|(?=[\w-]{{0,200}}?\d)(?=[\w-]{{0,200}}?\w{{16}})[\w-]{{20,}}+)",
    "sk_live_ sk_test_ sk_prod_ rk_live_ rk_test_ rk_prod_ whsec_": rf"{_LETTERS}{{10,}}+",  # Stripe
    # Groq, Replicate, Perplexity, xAI, Jina, RunPod
    "gsk_ r8_ pplx- xai- jina_ rpa_ api-key-": rf"{_LETTERS}{{30,}}+",
    # NVIDIA, Pinecone, LangSmith, Together, Tavily
    "nvapi- pcsk_ lsv2_pt_ lsv2_sk_ tgp_v1_ tvly-": r"[\w-]{20,}+",
    "wandb_v1_": r"\w{20,}+",
    "dapi": r"[0-9a-f]{32}",  # Databricks
    "xoxa- xoxb- xoxc- xoxd- xoxe- xoxe. xoxo- xoxp- xoxr- xoxs- xapp-": r"[\w.-]{10,}+",  # Slack
    "npm_": rf"{_LETTERS}{{36,}}+",
    "pypi-AgE": r"[\w-]{40,}+",
    "rubygems_": r"[0-9a-f]{48}",
    "dckr_pat_ dckr_oat_": r"[\w-]{20,}+",  # Docker
    "dop_v1_ doo_v1_ dor_v1_": r"[0-9a-f]{40,}+",  # DigitalOcean
    "hvs. hvb. hvr.": r"[\w-]{24,}+",  # Vault
    "glc_ glsa_": r"[\w+/-]{32,}+=*+",  # Grafana
    "NRAK- PMAK- lin_api_ ntn_ figd_ fo1_ sgp_ sntrys_ sntryu_": r"[\w+/-]{20,}+=*+",
    "shpat_ shpca_ shppa_ shpss_": r"[0-9a-fA-F]{32}",  # Shopify
    "ATATT3 ATCTT3 AKCp ABSK": r"[\w=/+-]{40,}+",  # Atlassian, Artifactory, Bedrock
    "dp.pt. dp.st. dp.ct.": rf"{_LETTERS}{{40,}}+",  # Doppler
    "xkeysib- sq0atp- sq0csp- tskey-": r"[\w-]{20,}+",
    "pscale_tkn_ pscale_oauth_ pscale_pw_": r"[\w=.-]{32,}+",
    "pul- key- SK": r"[0-9a-f]{32,}+",  # Pulumi, Mailgun, Twilio
    "pnu_": rf"{_LETTERS}{{36,}}+",
    "AGE-SECRET-KEY-1": r"[0-9A-Z]{50,}+",
    "ops_eyJ eyJhcGlf": r"[\w+/-]{40,}+=*+",  # 1Password, Neptune
    "SG.": r"[\w-]{16,64}+\.[\w-]{16,}+",  # SendGrid
    "https://hooks.slack.com/services/ https://hooks.slack.com/workflows/": r"[\w/-]++",
    "https://discord.com/api/webhooks/ https://discordapp.com/api/webhooks/": r"[\w/-]++",
    "https://hooks.zapier.com/hooks/catch/": r"[\w/-]++",
}
_PREFIXES = tuple(prefix for prefixes in _FORMATS for prefix in prefixes.split())
# A letter before it makes it another word, unless the letter belongs to an escaped line break.
_FORMATTED = re.compile(
    r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))(?:"
    + "|".join(
        f"(?:{'|'.join(map(re.escape, prefixes.split()))}){rest}" for prefixes, rest in _FORMATS.items()
    )
    + ")",
    re.ASCII,
)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----")
_PRIVATE_KEY_END = re.compile(r"-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----")

# Places.

# A password may contain an "@": the last one before the path ends it.
_URL_PASSWORD = re.compile(r"(?P<before>://[^/\s:@\"'<>]{0,200}+:)(?P<secret>[^/\s\"'<>]{1,2000})(?=@)")
# GitHub takes a token as the user, with this password.
_URL_TOKEN = re.compile(r"(?P<before>://)(?P<secret>[^/\s:@\"'<>]{1,2000}+)(?=:x-oauth-basic@)")
# A user without a password may be a token; a short word is the name of a person or a program.
_URL_USER = re.compile(r"(?P<before>https?://)(?P<secret>[^/\s:@\"'<>?#]{1,2000}+)(?=@)", re.IGNORECASE)
_USER_NAME = re.compile(r"[a-z][a-z_.-]{0,15}|oauth2|x-access-token")
_URL_SIGNATURE = re.compile(
    r"(?P<before>[?&](?:X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token)|AWSAccessKeyId|Signature"
    r"|sig|code|key|(?:\w{1,20}_)?token|api_?key|auth|pwd)=)(?P<secret>[^&\s\"'#<>]++)",
    re.IGNORECASE,
)
_BEARER = re.compile(
    r"(?P<before>\b(?:Bearer[ \t]{1,8}|Basic[ \t]{1,8}(?=[a-z+/]{0,200}+[\d=])))"
    r"(?P<secret>[\w.~+/-]{16,}+=*+)",
    re.IGNORECASE,
)
_ELEMENT = re.compile(r"<(?P<name>[A-Za-z][\w.:-]{0,80}+)>(?P<secret>[^<>\n]{1,2000}+)</")
# A line of ~/.netrc, and ~/.kaggle/kaggle.json.
_NETRC = re.compile(
    r"(?P<before>\bmachine[ \t]{1,8}\S{1,200}+\s{1,8}+login\s{1,8}+\S{1,200}+\s{1,8}+password\s{1,8}+)"
    r"(?P<secret>\S++)"
)
_USER_KEY = re.compile(
    r"(?P<before>[\"']username[\"']\s{0,8}+:\s{0,8}+[\"'][^\"'\n]{0,200}+[\"']\s{0,8}+,\s{0,40}+"
    r"[\"']key[\"']\s{0,8}+:\s{0,8}+[\"'])(?P<secret>[^\"'\s]++)"
)
_COMMANDS = ("sshpass", "docker", "mysql", "mariadb", "redis-cli", "curl", "wget", "7z", "rar")
_MIXED = re.compile(r"(?=\D{0,200}+\d)(?=[^A-Za-z]{0,200}+[A-Za-z])[^\s/:=.,]{6,200}+")
_COMMAND = re.compile(
    r"(?P<before>\b(?:(?:sshpass|docker[ \t]{1,4}login)\b[^\n|;&]{0,200}?[ \t]-p[ \t]{0,4}"
    r"|(?:mysql|mysqldump|mysqladmin|mariadb|7za?|rar)\b[^\n|;&]{0,200}?[ \t]-p"
    r"|redis-cli\b[^\n|;&]{0,200}?[ \t]-a[ \t]{1,4}"
    r"|(?:curl|wget)\b[^\n|;&]{0,200}?[ \t](?:-u|--user)[ \t]{1,4}['\"]?[\w.@-]{1,100}:))"
    r"(?P<secret>[^\s'\"]++)"
)
# A name and what assigns to it: `key=`, `key: `, `"key": `, `["key"] = `, `key: str = `, `--key `.
_ASSIGNED = re.compile(
    r"""
    (?:(?<!\S)(?P<dashes>--?+)|(?<!\w)(?<!\w[.-]))
    (?P<name>\w++(?:[.-]\w++)*+)
    (?:
        (?:\\?["'`]\]?)?[ \t]{0,8}
        (?P<sign>
            :[ ]?(?:str|bytes|str[ ]\|[ ]None|Optional\[str\]|SecretStr)[ ]?=(?!=)|=>|:=|={1,3}|:(?!:)(?!//)
        )
        [ \t]{0,8}
    |   (?(dashes)[ \t]{1,8}(?![-\s])|(?!))
    )
    """,
    re.VERBOSE,
)
# The word before a "key": `api key: `, `"api": {"key": `, and the line before in YAML.
_PARENT = re.compile(r"(?<!\w)(?P<name>\w{1,40}+)(?:[ ]|[\"']?[ ]?:[ ]?(?:\{\s{0,40}+|\n[ ]{1,40}+))[\"']?\Z")
_MAX_PARENT_LENGTH = 100
_SCHEME = re.compile(r"(?:Bearer|Basic|Digest|Token|Negotiate|ApiKey)[ \t]{1,8}(?=[^\s\"',])", re.IGNORECASE)
_QUOTE = re.compile(r"""[bBrRuUfF]{0,2}(?P<quote>\\?(?:\"{3}|'{3}|["'`]))""")
_BARE = re.compile(r"\$?\{\{?[^{}\n]{0,60}+\}++|<[^<>\n]{0,60}+>|[\[({][^\])}\n]*+[\])}]?|[^\s\"'`&;]*+")
_QUOTED = {
    '"': re.compile(r'(?:[^"\\\n]++|\\.)*+'),
    "'": re.compile(r"(?:[^'\\\n]++|\\.)*+"),
    "`": re.compile(r"[^`\n]*+"),
    '"""': re.compile(r'(?:[^"]++|"(?!""))*+'),
    "'''": re.compile(r"(?:[^']++|'(?!''))*+"),
}
_QUOTED_ESCAPED = re.compile(r"(?:[^\\\n]++|\\(?![\"'`])[^\n]?)*+")
# Every assigned name of a secret contains one of these.
_HINTS = tuple(
    _words(
        "pass pwd pw secret token key cred authorization kennwort contrase jwt cookie auth string connstr"
        " conn_str phrase recovery _pat -pat"
    )
)

# Replacements.


def _hidden(match: re.Match[str]) -> str:
    return match["before"] + REDACTED


def _hidden_user(match: re.Match[str]) -> str:
    return match[0] if _USER_NAME.fullmatch(match["secret"]) else match["before"] + REDACTED


def _hidden_element(match: re.Match[str]) -> str:
    if not is_secret_name(match["name"]) or _is_harmless(match["name"], match["secret"]):
        return match[0]
    return f"<{match['name']}>{REDACTED}</"


# Each row: literals (a text must contain one of them), a pattern, and its replacement. Formats can only occur
# in long words, and most texts have few of them.
_LONG_WORD = re.compile(r"(?<![\w.~/:-])[\w.~/:-]{15,}+", re.ASCII)
_Steps: TypeAlias = tuple[tuple[Sequence[str], re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]
_FORMAT_STEPS: _Steps = (
    (_PREFIXES, _FORMATTED, REDACTED),
    (
        ("eyJ",),
        re.compile(r"(?<![\w-])eyJ[\w-]{8,}+\.[\w-]{8,}+\.[\w-]++", re.ASCII),
        REDACTED,
    ),  # JSON web token
    (("Q~",), re.compile(r"(?<![\w~.-])[\w~.]{3}\dQ~[\w.~-]{31,}+", re.ASCII), REDACTED),  # Azure
    ((".atlasv1.",), re.compile(r"(?<![\w.])\w{14}\.atlasv1\.[\w=-]{40,}+", re.ASCII), REDACTED),  # Terraform
    ((":AA",), re.compile(r"(?<!\d)\d{8,10}:AA[\w-]{32,}+", re.ASCII), REDACTED),  # Telegram
    (("webhook.office.com/",), re.compile(r"(?<=webhook\.office\.com/)\S++"), REDACTED),  # Teams
)
_PLACE_STEPS: _Steps = (
    (("Signature=",), re.compile(r"(?<=Signature=)[0-9a-f]{32,}+"), REDACTED),  # a signed request to AWS
    ((":x-oauth-basic@",), _URL_TOKEN, _hidden),
    (("://",), _URL_PASSWORD, _hidden),
    (("://",), _URL_USER, _hidden_user),
    (("&", "?"), _URL_SIGNATURE, _hidden),
    (_COMMANDS, _COMMAND, _hidden),
    (("earer", "EARER", "asic", "ASIC"), _BEARER, _hidden),
    (("</",), _ELEMENT, _hidden_element),
    (("machine",), _NETRC, _hidden),
    (("username",), _USER_KEY, _hidden),
)

# Public functions.


@overload
def redact(value: str) -> str: ...
@overload
def redact(value: Any) -> Any: ...
def redact(value: Any) -> Any:
    """Returns a value without its secrets, with nested mappings, lists, tuples and sets.

    ```python
    print(redact({"lr": 0.1, "password": "hunter2"}))
    ```

    A key that names a secret hides its value; a key that is a secret is hidden itself. The caller's
    containers are never changed. Values that are nested more than a hundred levels deep, as in a structure
    that contains itself, are replaced by a text that says so.
    """
    return _redact(value, 0)


def redact_text(text: str, *, only_literals: bool = False) -> str:
    """Returns a text with its likely secrets replaced: keys, passwords, `token=…`.

    ```python
    print(redact_text("https://me:secret@example.org"))
    ```

    Args:
        text: any text, of any length.
        only_literals: for source code, where `token = next(tokens)` is harmless: only quoted strings are
            removed from assignments.
    """
    if len(text) < _MIN_LENGTH and "=" not in text and ":" not in text and "-" not in text:
        return text  # A word of a table, most often.
    if long_words := " ".join(_LONG_WORD.findall(text)):
        text = _apply(_FORMAT_STEPS, text, long_words)
    text = _apply(_PLACE_STEPS, text, text)
    if "-----BEGIN " in text:
        text = _without_private_keys(text)
    if "=" in text or ":" in text or "-" in text:
        lower = text.lower()
        if any(hint in lower for hint in _HINTS):
            text = _without_assigned_secrets(text, only_literals=only_literals)
    return text


def redact_table(columns: Sequence[Any], rows: Iterable[Sequence[Any]]) -> tuple[list[Any], list[list[Any]]]:
    """Returns a table with secrets replaced, in single cells and in whole columns named like secrets.

    ```python
    print(redact_table(["user", "password"], [["ann", "hunter2"]]))
    ```

    A column "token" usually has words, so only cells that look like secrets are removed.
    """
    hidden = {
        index: column
        for index, column in enumerate(columns)
        if is_secret_name(column) and column.lower() != "token"
    }

    def shown(index: int, cell: Any) -> Any:
        name = hidden.get(index)
        return redact(cell) if name is None or _is_harmless(name, cell) else REDACTED

    return redact(list(columns)), [[shown(index, cell) for index, cell in enumerate(row)] for row in rows]


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Returns a command line with its secrets replaced: `--api-key VALUE`, `--api-key=VALUE`, `-p VALUE`.

    ```python
    print(redact_arguments(["train.py", "--api-key", "abc123", "--lr=0.1"]))
    ```

    The value of `-p`, also without a space, is a password if it has at least six characters, with letters and
    digits, unlike `-p 8080` and `-patience`.
    """
    redacted: list[str] = []
    hide_next = False
    for argument in arguments:
        before = redacted[-1] if redacted else ""
        name, assigns, value = argument.partition("=")
        name = name.removeprefix("-D")  # A property, as of Java: `-DapiKey=…`.
        if hide_next and not argument.startswith("--"):
            redacted.append(argument if _is_harmless(before, argument) else REDACTED)
        elif before == "-p" and _MIXED.fullmatch(argument):
            redacted.append(REDACTED)
        elif argument.startswith("-p") and _MIXED.fullmatch(argument.removeprefix("-p")):
            redacted.append(f"-p{REDACTED}")
        elif assigns and is_secret_name(name) and not _is_harmless(name, value):
            # The whole value: the shell has removed the quotes that marked its end.
            redacted.append(f"{argument.partition('=')[0]}={REDACTED}")
        else:
            redacted.append(redact_text(argument))
        is_option = argument.startswith("-") and not assigns and redacted[-1] == argument
        hide_next = is_option and is_secret_name(argument)
    return redacted


# Implementation.


def _redact(value: Any, depth: int, parent: str = "") -> Any:
    if type(value) in _NUMBERS:
        return value  # First: a trace may hold a million numbers.
    match value:
        case str():
            return redact_text(value)
        case list() | tuple() | set() | frozenset() | Mapping() if depth >= _MAX_DEPTH:
            return "[nested too deeply]"
        case Mapping():
            return _redact_mapping(value, depth, parent)
        case tuple() if hasattr(value, "_fields"):
            items = dict(zip(value._fields, value, strict=True))
            return type(value)(*_redact_mapping(items, depth, parent).values())
        case list() | tuple() | set() | frozenset():
            return _like(value, _redact_items(value, depth, parent))
    return value


def _redact_mapping(value: Mapping[Any, Any], depth: int, parent: str) -> dict[Any, Any]:
    redacted: dict[Any, Any] = {}
    described = value.get("name", value.get("key")) if "value" in value else None
    has_user = "username" in value
    for key, item in value.items():
        shown = redact_text(key) if isinstance(key, str) else key
        if shown != key and shown in redacted:
            # Two secret keys stay two keys.
            shown = next(f"{shown} {n}" for n in itertools.count(2) if f"{shown} {n}" not in redacted)
        name = key
        if key == "value" and described is not None:
            name = described  # {"name": "API_KEY", "value": …}
        elif key == "value" and _is_auth(parent):
            name = parent
        elif key in {"key", "keys"}:
            # {"api": {"key": …}}, and kaggle.json: {"username": …, "key": …}
            name = "api.key" if has_user and isinstance(item, str) else f"{parent}.{key}"
        is_hidden = is_secret_name(name) and not _is_harmless(name, item)
        redacted[shown] = (
            REDACTED if is_hidden else _redact(item, depth + 1, key if isinstance(key, str) else "")
        )
    return redacted


def _redact_items(value: Iterable[Any], depth: int, parent: str) -> list[Any]:
    items = list(value)
    if items and all(map(_is_pair, items)):
        # A mapping as a list of pairs.
        return [
            _like(item, [item[0], *_redact_mapping({item[0]: item[1]}, depth, parent).values()])
            for item in items
        ]
    if isinstance(value, list | tuple) and any(isinstance(item, str) and item[:1] == "-" for item in items):
        # A command line.
        texts = redact_arguments([str(item) if isinstance(item, str | int | float) else "" for item in items])
        return [
            text if isinstance(item, str) or text == REDACTED else _redact(item, depth + 1, parent)
            for item, text in zip(items, texts, strict=True)
        ]
    return [_redact(item, depth + 1, parent) for item in items]


def _is_pair(item: object) -> bool:
    """Returns whether an item may be a name and its value; "token" and "pass" are more often words."""
    return (
        isinstance(item, list | tuple)
        and len(item) == 2  # noqa: PLR2004
        and isinstance(item[0], str)
        and item[0].lower() not in _WORDS_OF_TEXTS
    )


def _like(value: Any, items: list[Any]) -> Any:
    try:
        return type(value)(items)
    except Exception:  # noqa: BLE001  # a class of the user's, with a constructor of its own
        return items


def _apply(steps: _Steps, text: str, searched: str) -> str:
    for literals, pattern, replacement in steps:
        for literal in literals:
            if literal in searched:
                text = pattern.sub(replacement, text)
                break
    return text


def _without_private_keys(text: str) -> str:
    parts, position = [], 0
    while begin := _PRIVATE_KEY.search(text, position):
        end = _PRIVATE_KEY_END.search(text, begin.end())
        parts += [text[position : begin.start()], REDACTED]
        position = len(text) if end is None else end.end()
    return "".join((*parts, text[position:]))


def _without_assigned_secrets(text: str, *, only_literals: bool) -> str:
    parts, position = [], 0
    for assigned in _ASSIGNED.finditer(text):
        name = assigned["name"]
        if name.lower() in {"key", "keys"}:
            before = _PARENT.search(
                text, max(0, assigned.start() - _MAX_PARENT_LENGTH), assigned.start("name")
            )
            name = f"{before['name']}.{name}" if before else name
        if assigned.start() < position or not is_secret_name(name):
            continue
        if assigned["sign"] == ":" and name.lower() == "pass":
            continue  # A report of a test.
        opening = _QUOTE.match(text, assigned.end())
        if only_literals and opening is None:
            continue
        start, end = _bare_value(text, assigned.end()) if opening is None else _quoted_value(text, opening)
        value = text[start:end]
        if _is_auth(name) and opening is None and not _is_bare_auth(assigned["sign"], value):
            continue
        # The remaining text is short or removed, so no part of a text is searched again and again.
        if not value or _is_harmless(name, value) or (opening is None and _is_code(name, value)):
            continue
        parts += [text[position:start], REDACTED]
        position = end
    return "".join((*parts, text[position:]))


def _is_bare_auth(sign: str | None, value: str) -> bool:
    """Returns whether an unquoted value of `auth` is a secret, unlike in "auth: done" and `auth=(a, b)`."""
    return value[:1] not in {"(", "[", "{"} and (sign != ":" or _MIXED.fullmatch(value) is not None)


def _is_code(name: str, value: str) -> bool:
    return len(value) <= _MAX_HARMLESS_LENGTH and (value == name or _CODE.fullmatch(value) is not None)


def _quoted_value(text: str, opening: re.Match[str]) -> tuple[int, int]:
    """Returns start and end of a quoted value; without a closing quote it ends with the line."""
    quote = opening["quote"]
    body = _QUOTED_ESCAPED if quote[0] == "\\" else _QUOTED[quote]
    return opening.end(), _end(body.match(text, opening.end()))


def _bare_value(text: str, start: int) -> tuple[int, int]:
    """Returns start and end of a value: in brackets, or up to a space, without closing punctuation."""
    scheme = _SCHEME.match(text, start)
    end = _end(_BARE.match(text, start if scheme is None else scheme.end()))
    if text[start : start + 1] not in {"[", "(", "{", "<"} and text[start : start + 2] != "${":
        while end > start and text[end - 1] in ",.)]}":
            end -= 1
    return start, end


def _end(match: re.Match[str] | None) -> int:
    if match is None:
        raise AssertionError  # Each of these patterns also matches nothing.
    return match.end()
