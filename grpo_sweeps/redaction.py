"""Secrets out of what is written: `redact` for text, `redact_mapping` for a configuration. What runs keeps them.
Places out of what is published: `without_places` and `mapping_without_places` take out absolute paths (and so home
folders and users), hosts and secrets.

Redacted are: values of keys that are named like secrets (`api_key`, `hf_token`, `password`, ..., also `--api-key x` and
`API_KEY=x`), `Bearer ...`, the users and passwords of addresses, private keys, and the tokens whose first letters say
whose they are (Hugging Face, OpenAI, GitHub, AWS, Slack). Words that only look alike are not: counts of tokens, a
tokenizer's own tokens, keys to sort by, numbers, and references such as ${oc.env:NAME}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = "***"

_STRONG = frozenset([
    "password", "passwd", "passphrase", "pwd", "secret", "secrets", "credential", "credentials", "apikey",
    "authorization",
])  # fmt: skip
_KEYS = frozenset([  # before "key": what opens something, unlike a key to sort or look up by
    "api", "access", "secret", "private", "auth", "encryption", "signing", "account", "service", "ssh", "license", "hf",
    "huggingface", "openai", "anthropic", "wandb", "aws", "azure", "gcp", "github", "gitlab", "client", "master",
])  # fmt: skip
_TOKENS = frozenset([  # before "token": a token of a text or of a tokenizer
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "end", "start", "stop", "new", "first", "last", "next", "prev",
    "previous", "per", "by", "each", "image", "special", "any", "one", "a", "the", "in", "out", "level", "of",
])  # fmt: skip
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_NUMBER = re.compile(r"[-+]?\d[\d_.,]*(e[-+]?\d+)?", re.IGNORECASE)
_REFERENCE = re.compile(r"\$\w+|\$\{.*\}", re.DOTALL)
_CODE = frozenset(["str", "bytes", "Any", "object", "int", "float", "bool", "Bearer", "Basic", "Token"])
_NOTHING = frozenset(["", "null", "none", "true", "false", HIDDEN])

# Tried once per word and no further than a name is long: a megabyte without a space takes milliseconds.
_NAME = r"(?<![A-Za-z0-9_])[A-Za-z_][A-Za-z0-9_.-]{0,200}+"
_VALUE = re.compile(r"""\"(?:[^"\\\n]|\\.)*\"|'(?:[^'\\\n]|\\.)*'|\$\{[^}\n]{0,500}\}|[^\s,;&'"]+""")
_ANNOTATED = r":\s*(?:str|bytes|Any|object)(?:\s*\|\s*None)?\s*="  # of an argument in code
_ASSIGNED = re.compile(rf"(?P<name>{_NAME})[\"']?\s*(?:{_ANNOTATED}|[:=])\s*")
_FLAG = re.compile(rf"(?<!\S)[\"']?--(?P<name>{_NAME})[\"']?\s+")
_SCHEME = re.compile(r"\b(?P<kept>(?:Bearer|Basic|Token)\s+)(?=[^\s\"']*\d)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE)
_PART = r"[^\s/'\"`,;:=()\[\]{}<>|]+"
_ABSOLUTE = re.compile(rf"(?<![\w.~*/\\])(?:~[\w.-]*/+|/+(?!\*{{3}}){_PART}/+)(?:{_PART}/+)*(?P<last>{_PART})?/*")
_HOST_OF_ADDRESS = re.compile(r"(?<=://)[^/\s\"'?#]+")
_AT_HOST = re.compile(r"[\w.+-]+@[\w.-]*\w")
_HOME = re.compile(rf"/(?:home|Users)/{_PART}")
_LAUNCHER = re.compile(
    r"(?:(?<=')(?P<quoted>hydra\.launcher\.[\w.]+=)[^']+|(?P<plain>hydra\.launcher\.[\w.]+=)[^\s']+)"
)
_PLACES = frozenset(["path", "dir", "uri", "file", "folder"])  # the last word of a key whose value is a place

_WITH_DIGIT = r"(?=[A-Za-z0-9_-]*[0-9])"
_PATTERNS = [
    re.compile(pattern)
    for pattern in (
        r"(?<=://)[^/@\s\"']+(?=@)",
        r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
        rf"\bhf_{_WITH_DIGIT}[A-Za-z0-9]{{8,}}\b",
        rf"\bsk-{_WITH_DIGIT}[A-Za-z0-9_-]{{8,}}",
        r"\bgh[pousr]_[A-Za-z0-9]{16,}\b",
        r"\bgithub_pat_[A-Za-z0-9_]{16,}\b",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
        r"\bxox[abeoprs]-[A-Za-z0-9-]{8,}",
    )
]


def is_secret_name(name: str) -> bool:
    """Whether a key of this name holds a secret, by its last words.

    >>> [is_secret_name(name) for name in ("reward.api_key", "HF_TOKEN", "dbPassword", "auth-token")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("max_tokens", "tokenizer", "eos_token", "sort_key", "key", "rollout.tokens")]
    [False, False, False, False, False, False]
    """
    words = [word.lower() for word in _WORDS.findall(name.rpartition(".")[2])]
    if not words:
        return False
    last, before = words[-1], words[-2] if len(words) > 1 else ""
    if last in _STRONG:
        return True
    if last == "key":
        return before in _KEYS
    return last == "token" and before not in _TOKENS


def redact(text: str) -> str:
    """`text` with *** in the place of every secret in it.

    >>> redact("run --api-key abc reward.api_key=xyz uri=https://ann:pw@host/x max_tokens=12")
    'run --api-key *** reward.api_key=*** uri=https://***@host/x max_tokens=12'
    """
    for pattern in _PATTERNS:
        text = pattern.sub(HIDDEN, text)
    text = _SCHEME.sub(rf"\g<kept>{HIDDEN}", text)
    return _hidden_values(_hidden_values(text, _FLAG), _ASSIGNED)


def _hidden_values(text: str, pattern: re.Pattern[str]) -> str:
    """Every name is looked at, also those inside the value of another one; a value only behind a secret's name."""
    out, done = [], 0
    found = pattern.search(text)
    while found:
        at = found.end()
        named = is_secret_name(found["name"]) and not _is_path(text, found)
        value = _VALUE.match(text, at) if named else None
        quote = value[0][0] if value and value[0][0] in "\"'" else ""
        if value and _may_be_secret(value[0].strip(quote) if quote else value[0], bool(quote)):
            out += [text[done:at], quote, HIDDEN, quote]
            done = at = value.end()
        found = pattern.search(text, at)
    return "".join([*out, text[done:]])


def _is_path(text: str, found: re.Match[str]) -> bool:
    """Whether a name is the end of a path of which a sentence goes on: "/etc/passwd: a folder is needed"."""
    return text.startswith("/", found.start("name") - 1) and "=" not in found[0]


def _may_be_secret(value: str, quoted: bool) -> bool:
    """False for numbers, for nothing, for references, and without quotes for what is code."""
    if value.lower() in _NOTHING or _NUMBER.fullmatch(value) or _REFERENCE.fullmatch(value) or value.startswith(HIDDEN):
        return False
    return quoted or not (value.rstrip("),:") in _CODE or re.search(r"[(\[{<]|^(?:self|os|cfg|config|args)\.", value))


def redact_words(words: Sequence[str]) -> list[str]:
    """The words of a command line: a value ends where its word does, whatever is in it.

    >>> redact_words(["run", "reward.api_key=a b", "--token", "x y", "R=4"])
    ['run', 'reward.api_key=***', '--token', '***', 'R=4']
    """
    out: list[str] = []
    for i, word in enumerate(words):
        name, given, value = word.lstrip("-+~").partition("=")
        before = words[i - 1] if i else ""
        if given and is_secret_name(name) and _may_be_secret(value, quoted=True):
            out.append(word[: len(word) - len(value)] + HIDDEN)
        elif before.startswith("--") and "=" not in before and is_secret_name(before.lstrip("-")):
            out.append(HIDDEN if _may_be_secret(word, quoted=True) else word)
        else:
            out.append(redact(word))
    return out


def redact_mapping(content: Any, name: str = "") -> Any:
    """The same configuration (mappings, sequences, plain values) with *** in the place of every secret text in it."""
    return _each_text(content, name, _redacted)


def _redacted(text: str, name: str) -> str:
    return HIDDEN if is_secret_name(name) and _may_be_secret(text, quoted=True) else redact(text)


def _each_text(content: Any, name: str, change: Callable[[str, str], str]) -> Any:
    """The same configuration with `change(text, name of its key)` in the place of every text."""
    if isinstance(content, Mapping):
        return {key: _each_text(value, str(key), change) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_each_text(value, name, change) for value in content]
    return change(content, name) if isinstance(content, str) else content


def holds_hidden(content: Any) -> bool:
    """Whether a secret was taken out of a configuration that was read back."""
    if isinstance(content, Mapping):
        return any(holds_hidden(value) for value in content.values())
    if isinstance(content, list | tuple):
        return any(holds_hidden(value) for value in content)
    return isinstance(content, str) and HIDDEN in content


def without_places(text: str, hosts: Sequence[str] = ()) -> str:
    """`text` as it may be published: of absolute paths their last part, no host, no user, no secret, and nothing of
    what a cluster's launcher was told.

    hosts: names of machines, which count with and without their domain.

    >>> without_places("run model.path=/home/ann/models/qwen tracking.uri=http://ann:x@db:5000/y task.path=data/gsm8k")
    'run model.path=***/qwen tracking.uri=http://***/y task.path=data/gsm8k'
    >>> without_places("node7.site: ~/runs/a.py of /home/ann, line 3 (and/or 1 / 2)", ["node7.site"])
    '***: ***/a.py of ~, line 3 (and/or 1 / 2)'
    """
    text = _HOST_OF_ADDRESS.sub(HIDDEN, redact(text))
    text = _AT_HOST.sub(HIDDEN, text)
    own = str(Path.home())
    text = _HOME.sub("~", text.replace(own, "~") if own.count("/") > 1 else text)
    text = _ABSOLUTE.sub(lambda found: f"{HIDDEN}/{found['last'] or ''}", text)
    text = _LAUNCHER.sub(lambda found: f"{found['quoted'] or found['plain']}{HIDDEN}", text)
    names = {name for host in hosts for name in (host, host.partition(".")[0]) if len(name) > 1}
    for name in sorted(names - {"localhost"}, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", HIDDEN, text)
    return text


def mapping_without_places(content: Any, name: str = "") -> Any:
    """The same configuration as it may be published; a value that is a place keeps the last part of an absolute path.

    >>> mapping_without_places({"model": {"path": "/home/ann lee/qwen"}, "task": {"path": "data/gsm8k"}})
    {'model': {'path': '***/qwen'}, 'task': {'path': 'data/gsm8k'}}
    """
    return _each_text(content, name, _placeless)


def _placeless(text: str, name: str) -> str:
    if re.split(r"[_.]", name)[-1] in _PLACES and text.startswith(("/", "~")):
        return f"{HIDDEN}/{text.rstrip('/').rpartition('/')[2]}"
    hidden = _redacted(text, name)
    return hidden if hidden == HIDDEN else without_places(hidden)
