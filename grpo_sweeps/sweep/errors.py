"""Turns errors of Hydra and OmegaConf, several lines each, into one sentence: the key, the value, what is allowed."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from grpo_sweeps.config import NOT_OFFERED, dotted_keys

OPEN_GROUPS = ("task", "reward", "estimator")
TYPES = {"Integer": "an integer", "Float": "a number", "Boolean": "true or false", "String": "a text"}


def explain(error: BaseException) -> str:
    """One sentence for an error of Hydra, OmegaConf or the YAML parser."""
    chain = list(_chain(error))
    for reader in (
        _missing_choice,
        _missing_value,
        _wrong_type,
        _unknown_key,
        _no_override,
        _sweep_without_m,
        _bad_override,
        _already_there,
        _interpolation,
    ):
        for item in chain:
            sentence = reader(item, error)
            if sentence:
                return sentence
    return _flat(str(chain[-1]) or str(error)) or type(error).__name__


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what it was raised from, each once: a raised context may lead back to an error of the chain."""
    item: BaseException | None = error
    seen = set[int]()
    while item is not None and id(item) not in seen:
        seen.add(id(item))
        yield item
        item = item.__cause__ or (None if item.__suppress_context__ else item.__context__)


def _missing_choice(item: BaseException, error: BaseException) -> str | None:
    """model=unknown -> the choices of model."""
    options = getattr(item, "options", None)
    found = re.search(r"Could not find '([^']+)'", str(item))
    if not found:
        return None
    group, _, name = found.group(1).rpartition("/")
    if not group:
        return f"{name}: no such configuration file"
    shown = ", ".join(options or []) or "none"
    return (
        f"{'+' * (group == 'sweeps')}{group}={name}: no such choice; {group} is one of "
        f"{shown}{_hint(name, options or [])}"
    )


def _missing_value(item: BaseException, error: BaseException) -> str | None:
    if type(item).__name__ != "MissingMandatoryValue":
        return None
    key = getattr(item, "full_key", None) or "?"
    example = f", such as {key}=my_module.my_function" if str(key).endswith("_target_") else ""
    return f"{key}: a value is required and none is given{example}"


def _wrong_type(item: BaseException, error: BaseException) -> str | None:
    text = str(item)
    key = getattr(item, "full_key", None)
    if type(item).__name__ not in ("ValidationError", "UnsupportedValueType") or not key:
        return None
    value = re.search(r"Value '(.*?)'", text)
    shown = value.group(1) if value else getattr(item, "value", "?")
    if wanted := re.search(r"could not be converted to (\w+)", text):
        return f"{key}={shown}: {TYPES.get(wanted.group(1), wanted.group(1).lower())} is expected"
    if "is incompatible with type hint" in text:
        return f"{key}={shown}: {_expected(text)} is expected"
    if "is not a valid bool" in text:
        return f"{key}={shown}: true or false is expected"
    if "is not a ListConfig" in text:
        return f"{key}={shown}: a list is expected, such as {key}=[a,b]"
    if "NoneType is not a subclass of" in text:
        return f"{key}=null: a value is needed, null is not allowed"
    if "is not a subclass of" in text:
        keys = ", ".join(_keys(_child(item, str(key)))) or "KEY"
        return f"{key}={shown}: a group of keys is expected, not a single value; set {key}.KEY=VALUE (keys: {keys})"
    if "Incompatible value" in text or "not Optional" in text or "non-optional" in text:
        return f"{key}=null: a value is needed, null is not allowed"
    return f"{key}={shown}: {_flat(text)}"


def _expected(text: str) -> str:
    hint = re.search(r"type hint '(.+?)'(?:\n|$)", text)
    if not hint:
        return "another type"
    words = hint.group(1).lower()
    marks = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "a text"}
    names = [word for mark, word in marks.items() if mark in words]
    return " or ".join(names + ["null"] * ("optional" in words or "none" in words)) or hint.group(1)


def _unknown_key(item: BaseException, error: BaseException) -> str | None:
    """trainer.lrr=1 -> the keys of trainer, and the nearest one."""
    if type(item).__name__ in ("ConfigKeyError", "ConfigAttributeError"):
        key = str(getattr(item, "full_key", None) or getattr(item, "key", "?"))
        parent = getattr(item, "parent_node", None)
        return _no_such_key(key, _given_value(error), _keys(parent))
    return None


def _no_override(item: BaseException, error: BaseException) -> str | None:
    """The sentence for an override that matches neither a key nor a group."""
    text = str(item)
    if found := re.search(r"Could not override '([^']+)'", text):
        key = found.group(1)
        if "To append to your default list" in text or "No match in the defaults list" in text:
            near = re.search(r"Did you mean to override (\S+?)\?", text)
            return f"{key}={_given_value(error)}: no such group" + (
                f"; did you mean {near.group(1)}?" if near else "; see --help"
            )
        return _no_such_key(key, _given_value(error), [])
    if found := re.search(r"override (\S+?)=?(\S*) looks like a config group", text, re.IGNORECASE):
        return f"{found.group(1)}={found.group(2)}: no such group; see --help"
    if found := re.search(r"Could not delete from config\. '([^']+)' does not exist", text):
        return f"~{found.group(1)}: there is no such key to drop"
    return None


def _no_such_key(key: str, value: str, allowed: list[str]) -> str:
    group, _, last = key.rpartition(".")
    shown = f"{key}={value}" if value else key
    if last in NOT_OFFERED:
        return f"{shown}: {NOT_OFFERED[last]}"
    if group == "hydra.launcher" and not allowed:
        return (
            f"{shown}: the basic launcher has no keys; add hydra/launcher=submitit_local or "
            f"hydra/launcher=submitit_slurm"
        )
    sentence = f"{shown}: no such key"
    if near := _nearest(group, last, allowed):
        sentence += f"; did you mean {near}?"
    if allowed:
        sentence += f"; allowed {'in ' + group if group else 'here'}: {', '.join(allowed)}"
    if group in OPEN_GROUPS:
        sentence += f"; an argument that your own function takes is added with +{shown}"
    return sentence


def _nearest(group: str, last: str, allowed: list[str]) -> str:
    """The key that was meant: one of another group that ends in the very word, as lr does of trainer.lr, else one here
    that looks like it, else one elsewhere."""
    ends: dict[str, str] = {}
    for key in dotted_keys():
        ends.setdefault(key.rpartition(".")[2], key)
    if last in ends:
        return ends[last]
    if near := difflib.get_close_matches(last, allowed, n=1):
        return f"{group + '.' if group else ''}{near[0]}"
    return "".join(ends[near] for near in difflib.get_close_matches(last, list(ends), n=1))


def _sweep_without_m(item: BaseException, error: BaseException) -> str | None:
    text = str(item)
    if found := re.search(r"Ambiguous value for argument '(.+?)'\n", text):
        return (
            f"{found.group(1)}: several values are a sweep; add -m for one, or write a list as key=[a,b] and "
            f"a text as \"key='a,b'\""
        )
    if found := re.search(r"Sweep parameters '(.+?)' requires --multirun", text):
        return f"{found.group(1)}: several values are a sweep; add -m"
    if found := re.search(r"Sweeping over Hydra's configuration is not supported : '(.+?)'", text):
        return f"{found.group(1)}: keys of hydra cannot be an axis of a sweep; give one value"
    if found := re.search(r"does not support sweep type : (\w+)", text):
        return f"{found.group(1).lower()}: cannot be an axis here; choices (a,b,c) and range(start,stop) are allowed"
    return None


def _bad_override(item: BaseException, error: BaseException) -> str | None:
    if type(item).__name__ != "OverrideParseException":
        return None
    return (
        f"{getattr(item, 'override', '?')}: cannot be read as KEY=VALUE "
        f"({_flat(str(item).splitlines()[0])}); {_quoted(str(getattr(item, 'override', '')))}"
    )


def _quoted(override: str) -> str:
    """How a value with special characters is typed in a shell."""
    key, equals, value = override.partition("=")
    if not equals:
        return "write KEY=VALUE"
    if not re.fullmatch(r"[+~]{0,2}[\w./@]+", key):
        return "quote the value within the shell's quotes, as in 'model.path=\"/x=y\"'"
    bare = value.strip("'\"").replace("\\", "\\\\").replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{bare}"')
    return f"quote the value within the shell's quotes: {quoted}"


def _interpolation(item: BaseException, error: BaseException) -> str | None:
    if not type(item).__name__.startswith("Interpolation") and type(item).__name__ != "UnsupportedInterpolationType":
        return None
    found = re.search(r"'(.+?)'", str(item))
    name = found.group(1) if found else "..."
    return (
        f"${{{name}}}: {_flat(str(item))}; a key of the configuration or a resolver such as ${{oc.env:NAME}} is allowed"
    )


def _already_there(item: BaseException, error: BaseException) -> str | None:
    text = str(item)
    if found := re.search(r"An item is already at '([^']+)'", text):
        return f"+{found.group(1)}: is there already; write {found.group(1)}=VALUE without the +"
    if found := re.search(r"Could not append '([^']+)'\.\s*'([^']+)' is already in the defaults list", text, re.DOTALL):
        return f"+{found.group(1)}: {found.group(2)} has a choice already; write {found.group(1)} without the +"
    if found := re.search(r"Could not append '([^']+)'", text):
        return f"+{found.group(1)}: is there already; write {found.group(1)} without the +"
    if found := re.search(r"Multiple values for (\S+?)\.|^(\S+) appears more than once in the final defaults", text):
        return (
            f"+{found.group(1) or found.group(2)}: has a choice already; write "
            f"{found.group(1) or found.group(2)}=CHOICE without the +"
        )
    if "Config group override must be a string" in text or isinstance(item, TypeError):
        return f"{_flat(text)}: a group takes the name of a choice, GROUP=CHOICE; see --help"
    return None


def _given_value(error: BaseException) -> str:
    """The value in the override that Hydra names in any error of the chain."""
    for item in _chain(error):
        if found := re.search(r"(?:use \+|Error merging override |default list use \+)(\S+?)=(.*)", str(item)):
            return found.group(2).strip()
    return ""


def _child(item: BaseException, key: str) -> Any:
    """The node that the failed assignment was aimed at."""
    parent = getattr(item, "parent_node", None)
    last = key.rsplit(".", 1)[-1]
    if parent is None or not hasattr(parent, "_get_node"):
        return None
    try:
        return parent._get_node(int(last.strip("[]")) if last.strip("[]").isdigit() else last)
    except (KeyError, IndexError, OmegaConfBaseException):
        return None


def _keys(node: Any) -> list[str]:
    try:
        return [str(key) for key in node if str(key) not in ("hydra", "_target_")]
    except TypeError:
        return []


def _hint(name: str, options: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(options), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _flat(text: str) -> str:
    """Several lines as one, without OmegaConf's trailing key and type lines."""
    lines = [line.strip() for line in text.splitlines()]
    return " ".join(
        line for line in lines if line and not re.match(r"(full_key|reference_type|object_type):|Set the env", line)
    )
