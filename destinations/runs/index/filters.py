"""The filter language: a lexer and a recursive-descent parser; `filter_sql` evaluates the tree.

```
filter     = all { "or" all }                          all  = not { "and" not }
not        = "not" not | "(" filter ")" | test
test       = field comparison value                    == != < <= > >=
           | value comparison field
           | field ["not"] "in" "(" value { "," value } ")"
           | text ["not"] "in" "tags"
           | field "~" text                            a regular expression that matches anywhere
           | "exists" "(" field ")"
           | field                                     the field is true
field      = status | run_id | name | … | "hparams." name | "summary." name | name
value      = number | text | true | false | none | nan | inf | date | now | now-2d
```

Every test is true or false. If a run lacks the field, the test is false, even with `!=` and `not in`; `not`
inverts it.
"""

import datetime as dt
import math
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Literal, cast

import attrs

from destinations.runs.errors import FilterError, near_names
from destinations.runs.files import clean_text, integer_of
from destinations.runs.order import Kind, key_of
from destinations.runs.record import FIELDS, FieldType, Scalar

__all__ = [
    "Chain",
    "Compare",
    "Exists",
    "Field",
    "Found",
    "In",
    "Match",
    "Node",
    "Not",
    "Operator",
    "Test",
    "fields_of",
    "parse_field",
    "parse_filter",
]

Operator = Literal["<", "<=", ">", ">="]


@attrs.frozen
class Field:
    """The field of a test; `group` is "run", "hparams" or "summary"."""

    group: str
    name: str

    @property
    def type(self) -> FieldType | Literal["cell"]:
        """The type of its values; "cell" is any scalar."""
        return FIELDS[self.name].type if self.group == "run" else "cell"

    def __str__(self) -> str:
        return self.name if self.group == "run" else f"{self.group}.{self.name}"


@attrs.frozen
class Compare:
    """The field is less or greater than a value."""

    field: Field
    operator: Operator
    value: Scalar


@attrs.frozen
class In:
    """The field is one of some values, or none of them; for tags, contains one of them."""

    field: Field
    values: tuple[Scalar, ...]
    negated: bool = False


@attrs.frozen
class Match:
    """A regular expression matches anywhere in the text."""

    field: Field
    pattern: str


@attrs.frozen
class Found:
    """The run is one of these; replaces a `Match` after its texts were searched.

    Attributes:
        runs: their ids in the index.
    """

    runs: tuple[int, ...]


@attrs.frozen
class Exists:
    """The run has the field."""

    field: Field


@attrs.frozen
class Not:
    """The negation of a test."""

    node: "Node"


@attrs.frozen
class Chain:
    """Several tests: all must hold ("and"), or one ("or")."""

    word: Literal["and", "or"]
    nodes: tuple["Node", ...]


Test = Compare | In | Match | Exists
Node = Test | Found | Not | Chain


def fields_of(node: Node, *, with_exists: bool = True) -> Iterator[Field]:
    """Yields the fields of a filter's tests.

    Args:
        node: the filter.
        with_exists: whether to include fields that only `exists` tests.
    """
    match node:
        case Not():
            yield from fields_of(node.node, with_exists=with_exists)
        case Chain():
            for one in node.nodes:
                yield from fields_of(one, with_exists=with_exists)
        case Compare() | In() | Match() | Exists():
            if with_exists or not isinstance(node, Exists):
                yield node.field


_GROUPS = ("hparams", "summary")
_FLIPPED = {"==": "==", "!=": "!=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_CONSTANTS: dict[str, Scalar] = {
    "true": True,
    "false": False,
    "none": None,
    "null": None,
    "nan": math.nan,
    "inf": math.inf,
}
# The kind of value that each type of field may be compared with. Cells may be compared with any value.
_WANTED: dict[str, tuple[Kind, str]] = {
    "text": (Kind.TEXT, "a text in quotes"),
    "texts": (Kind.TEXT, "a text in quotes"),
    "bool": (Kind.BOOL, "true or false"),
    "time": (Kind.NUMBER, "a time such as now-2d"),
    "duration": (Kind.NUMBER, "a number of seconds"),
}
_KEYWORDS = frozenset({"and", "or", "not", "in", "exists"})
_UNIT_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
# Within the limits of Python's stack and SQLite.
_MAX_DEPTH = 100
_MAX_TESTS = 500
_MAX_TOKENS = 20_000


Names = Callable[[str], Collection[str]]
"""Returns the names of a group, "hparams" or "summary"."""


def parse_filter(text: str, now: float, names: Names | None = None) -> Node:
    """Parses a filter; returns its tree.

    Args:
        text: the filter.
        now: the value of `now`, in seconds since 1970.
        names: returns the names of hyperparameters and metrics, so that these need no group; called only for
            a name that is no field.

    Raises:
        FilterError: the filter does not parse; the message shows the position.
    """
    # As in names of records. A command's argument may have bytes that are not UTF-8.
    return _Parser(clean_text(text), now, names).parse()


def parse_field(text: str, names: Names | None = None) -> Field:
    """Parses the name of a field, such as `created_at` or `summary.val/acc`; odd names need no quotes.

    Args:
        text: the name.
        names: as for `parse_filter`.

    Raises:
        FilterError: there is no such field.
    """
    text = clean_text(text)
    group, dot, name = text.partition(".")
    if dot and group in _GROUPS and name and name[0] not in "\"'":
        return Field(group, name)
    if names is not None and text not in FIELDS:
        # The lexer would split a name with odd characters, such as a space.
        return _field(_Token("word", text, 0), text, names)
    tokens = list(_tokens(text))
    if len(tokens) == 1 and tokens[0].kind == "word":
        return _field(tokens[0], text)
    raise FilterError("field must be one name", text, 0)


@attrs.frozen
class _Token:
    kind: Literal["word", "text", "number", "symbol", "end"]
    value: Any
    start: int
    # The quoted name after the group, in `summary."a b"`.
    quoted: str | None = None


_LEXEME = re.compile(
    r"""(?P<space>\s+)
    |(?P<date>\d{4}-\d{2}-\d{2}(?:[T\ ]\d{2}:\d{2}(?::\d{2}(?:\.\d+)?)?(?:Z|[-+]\d{2}:?\d{2})?)?)
    |(?P<number>[-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.:/])|[-+]inf\b)
    |(?P<now>now(?:\s*[-+]\s*\d+(?:\.\d+)?[smhdw])*(?![\w.]))
    # Names of metrics and hyperparameters, with dots, slashes and dashes.
    |(?P<word>[^\W\d][\w./@:%+$\#-]*)
    |(?P<symbol>==|!=|<=|>=|[<>~(),\[\]=!&|])""",
    re.VERBOSE,
)
_SHIFT = re.compile(r"([-+])\s*(\d+(?:\.\d+)?)([smhdw])")
_QUOTES = {'"', "'", "`"}
# Only quotes and backslashes are escaped, because regular expressions have many backslashes.
_QUOTED = re.compile(r"""(["'`])((?:\\(?:\1|\\)|(?!\1).)*+)\1""", re.DOTALL)


def _tokens(text: str, now: float = 0.0) -> Iterator[_Token]:
    position = 0
    while (start := position) < len(text):
        if text[start] in _QUOTES:
            value, position = _quoted(text, start)
            yield _Token("text", value, start)
            continue
        found = _LEXEME.match(text, start)
        if found is None:
            problem = f'unexpected character {text[start]!r}. Put odd names in quotes: summary."a b".'
            raise FilterError(problem, text, start)
        lexeme, position = found[0], found.end()
        match found.lastgroup:
            case "date":
                yield _Token("number", _date(lexeme, text, start), start)
            case "number":
                yield _Token("number", _number(lexeme), start)
            case "now":
                shifts = _SHIFT.findall(lexeme)
                seconds = sum(float(f"{sign}{count}") * _UNIT_SECONDS[unit] for sign, count, unit in shifts)
                yield _Token("number", now + seconds, start)
            case "word" if lexeme.endswith(".") and text[position : position + 1] in _QUOTES:
                name, position = _quoted(text, position)
                yield _Token("word", lexeme[:-1], start, name)
            case "word":
                yield _Token("word", lexeme, start)
            case "symbol":
                yield _Token("symbol", lexeme, start)


def _quoted(text: str, start: int) -> tuple[str, int]:
    """Returns the text in quotes, and where it ends."""
    found = _QUOTED.match(text, start)
    if found is None:
        raise FilterError(f"missing closing {text[start]}", text, start)
    return re.sub(rf"\\([{found[1]}\\])", r"\1", found[2]), found.end()


def _number(text: str) -> float:
    digits = text.replace("_", "")
    is_whole = re.fullmatch(r"[-+]?\d+", digits) and not text.endswith("_")
    return integer_of(digits) if is_whole else float(digits)


def _date(found: str, text: str, start: int) -> float:
    try:
        # Without a zone, it's local time.
        return dt.datetime.fromisoformat(found).timestamp()
    except (ValueError, OverflowError, OSError) as error:
        raise FilterError(f"invalid date {found!r}: {error}", text, start) from None


def _field(token: _Token, text: str, names: Names | None = None) -> Field:
    word: str = token.value
    if token.quoted is not None:
        if word in _GROUPS:
            return Field(word, token.quoted)
    else:
        group, dot, name = word.partition(".")
        if dot and group in _GROUPS and name:
            return Field(group, name)
        if word in FIELDS:
            return Field("run", word)
        groups = [one for one in _GROUPS if names is not None and word in names(one)]
        if len(groups) == 1:
            return Field(groups[0], word)
        if groups:
            both = f"{word!r} is a hyperparameter and a metric: write hparams.{word} or summary.{word}."
            raise FilterError(both, text, token.start)
    cells = [] if names is None else [f"{one}.{name}" for one in _GROUPS for name in names(one)]
    near: Sequence[str] = [one for one in cells if one.endswith((f".{word}", f"/{word}"))][:3]
    near = near or near_names(word, [*FIELDS, "hparams.", "summary."])
    near = near or (near_names(word.partition(".")[0], _GROUPS) if "." in word else ())
    offer = f" Did you mean {' or '.join(near)}?" if near else ""
    if not near and "." not in word:
        offer = f" For a metric write summary.{word}, for a hyperparameter hparams.{word}."
    raise FilterError(
        f"unknown field {word!r}.{offer} Fields are {', '.join(FIELDS)}, hparams.NAME and summary.NAME.",
        text,
        token.start,
    )


class _Parser:
    """A recursive-descent parser of one filter."""

    def __init__(self, text: str, now: float, names: Names | None) -> None:
        self._text = text
        self._names = names
        self._tokens: list[_Token] = []
        for token in _tokens(text, now):
            if len(self._tokens) == _MAX_TOKENS:
                raise FilterError(f"filter has more than {_MAX_TOKENS} words.", text, token.start)
            self._tokens.append(token)
        self._tokens.append(_Token("end", "", len(text)))
        self._index = 0
        self._depth = 0
        self._tests = 0

    def parse(self) -> Node:
        node = self._any()
        token = self._token
        if token.kind != "end":
            hint = {"=": " Write ==.", "&": " Write and.", "|": " Write or.", "!": " Write not."}
            raise self._error(
                f"expected and, or, or the end, got {self._shown(token)}.{hint.get(token.value, '')}"
            )
        return node

    @property
    def _token(self) -> _Token:
        return self._tokens[self._index]

    def _next(self) -> _Token:
        token = self._token
        self._index += 1
        return token

    def _is(self, kind: str, *values: str) -> bool:
        token = self._token
        return token.kind == kind and token.value in values and token.quoted is None

    def _any(self) -> Node:
        return self._chain("or", self._all)

    def _all(self) -> Node:
        return self._chain("and", self._not)

    def _chain(self, word: Literal["and", "or"], part: Callable[[], Node]) -> Node:
        nodes = [part()]
        while self._is("word", word):
            self._next()
            nodes.append(part())
        return nodes[0] if len(nodes) == 1 else Chain(word, tuple(nodes))

    def _not(self) -> Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise self._error(f"filter is nested more than {_MAX_DEPTH} deep.")
        try:
            if self._is("word", "not"):
                self._next()
                return Not(self._not())
            if self._is("symbol", "("):
                self._next()
                node = self._any()
                self._expect(")")
                return node
            return self._test()
        finally:
            self._depth -= 1

    def _test(self) -> Node:
        self._tests += 1
        if self._tests > _MAX_TESTS:
            raise self._error(f"filter has more than {_MAX_TESTS} tests.")
        if self._is("word", "exists"):
            self._next()
            self._expect("(")
            field = self._field()
            self._expect(")")
            return Exists(field)
        token = self._token
        if token.kind in {"text", "number"} or (token.kind == "word" and token.value in _CONSTANTS):
            return self._value_first()
        field = self._field()
        if self._is("symbol", "~"):
            return self._match(field)
        if self._is("word", "in", "not"):
            negated = self._negation()
            return In(field, self._list(field), negated)
        if self._token.kind == "symbol" and self._token.value in _FLIPPED:
            operator = self._next().value
            return self._compare(field, operator, self._value(field))
        if field.type not in {"bool", "cell"}:
            hint = " Write ==." if self._is("symbol", "=") else ""
            raise self._error(
                f"expected a comparison (== != < <= > >= ~ in) after {field}, "
                f"got {self._shown(self._token)}.{hint}"
            )
        return In(field, (True,))

    def _value_first(self) -> Node:
        token = self._next()
        if self._is("word", "in", "not"):
            negated = self._negation()
            field = self._field()
            if field.type != "texts":
                problem = f"expected tags or a list after in, got {field}. Write {field} in (…)."
                raise self._error(problem, self._tokens[self._index - 1])
            return In(field, (self._checked(token, field),), negated)
        if self._token.kind == "symbol" and self._token.value in _FLIPPED:
            operator = _FLIPPED[self._next().value]
            field = self._field()
            return self._compare(field, operator, self._checked(token, field))
        raise self._error(
            f"expected a comparison after {self._shown(token)}, got {self._shown(self._token)}."
        )

    def _compare(self, field: Field, operator: str, value: Scalar) -> Node:
        if operator in {"==", "!="}:
            return In(field, (value,), negated=operator == "!=")
        if field.type == "texts" or key_of(value)[0] in {Kind.BOOL, Kind.NONE}:
            what = "tags" if field.type == "texts" else "true, false and none"
            problem = f"{operator} does not apply to {what}. Use == or !=."
            raise self._error(problem, self._tokens[self._index - 1])
        return Compare(field, cast("Operator", operator), value)

    def _match(self, field: Field) -> Node:
        self._next()
        token = self._next()
        if field.type not in {"text", "texts", "cell"}:
            raise self._error(f"~ does not apply to {field}, which is not text.", token)
        if token.kind != "text":
            problem = f"expected a regular expression in quotes after ~, got {self._shown(token)}."
            raise self._error(problem, token)
        try:
            re.compile(token.value)
        except (re.error, RecursionError, OverflowError) as error:
            raise self._error(f"invalid regular expression {token.value!r}: {error}.", token) from None
        return Match(field, token.value)

    def _negation(self) -> bool:
        negated = bool(self._next().value == "not")
        if negated:
            if not self._is("word", "in"):
                raise self._error(f"expected in after not, got {self._shown(self._token)}.")
            self._next()
        return negated

    def _list(self, field: Field) -> tuple[Scalar, ...]:
        if not self._is("symbol", "(", "["):
            raise self._error(f"expected a list in parentheses after in, got {self._shown(self._token)}.")
        closing = ")" if self._next().value == "(" else "]"
        values = [self._value(field)]
        while self._is("symbol", ","):
            self._next()
            if self._is("symbol", closing):
                break
            values.append(self._value(field))
        self._expect(closing)
        return tuple(values)

    def _field(self) -> Field:
        token = self._token
        if token.kind != "word" or (token.quoted is None and token.value in _KEYWORDS | _CONSTANTS.keys()):
            raise self._error(f"expected a field, got {self._shown(token)}.")
        self._next()
        return _field(token, self._text, self._names)

    def _value(self, field: Field) -> Scalar:
        """Parses a value of the field's type."""
        value = self._checked(self._token, field)
        self._next()
        return value

    def _checked(self, token: _Token, field: Field) -> Scalar:
        """Returns the value of a token, which must have the field's type."""
        value: Scalar
        if token.kind in {"text", "number"}:
            value = token.value
        elif token.kind == "word" and token.quoted is None and token.value in _CONSTANTS:
            value = _CONSTANTS[token.value]
        else:
            hint = f' Put text in quotes: "{token.value}".' if token.kind == "word" else ""
            raise self._error(f"expected a value, got {self._shown(token)}.{hint}")
        wanted, words = _WANTED.get(field.type, (None, ""))
        if wanted is not None and key_of(value)[0] is not wanted:
            problem = f"expected {words} to compare with {field}, got {self._shown(token)}."
            raise self._error(problem, token)
        return value

    def _expect(self, symbol: str) -> None:
        if not self._is("symbol", symbol):
            raise self._error(f"expected {symbol}, got {self._shown(self._token)}.")
        self._next()

    def _shown(self, token: _Token) -> str:
        if token.kind == "end":
            return "the end"
        following = self._tokens[self._tokens.index(token) + 1].start
        return self._text[token.start : following].strip()

    def _error(self, problem: str, token: _Token | None = None) -> FilterError:
        """Returns an error at a token; by default at the next one."""
        return FilterError(problem, self._text, (token or self._token).start)
