"""Which words are secrets and which only look alike, in texts, commands and configurations; who may read a file."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import yaml

from grpo_sweeps.redaction import HIDDEN, holds_hidden, is_secret_name, redact, redact_mapping, redact_words
from grpo_sweeps.sweep.execute import write_config
from grpo_sweeps.tracking import mirror
from grpo_sweeps.tracking.provenance import Source, write
from grpo_sweeps.tracking.status import RunStatus, read_status, write_status
from grpo_sweeps.types import ConfigError

SECRET = "Zq7xW2mK9vB4tR8y"
SECRETS = [
    f"--api-key {SECRET}",
    f"--api-key={SECRET}",
    f"--token '{SECRET} b'",
    f"API_KEY={SECRET}",
    f"reward.api_key={SECRET}",
    f"HF_TOKEN={SECRET}",
    f'"password": "{SECRET}"',
    f"password: {SECRET}",
    f"dbPassword = '{SECRET}'",
    f"auth_token: {SECRET}",
    f"reward={{api_key: {SECRET}, x: 1}}",
    f"Authorization: Bearer {SECRET}",
    f"curl -H 'Authorization: Basic {SECRET}'",
    f"hf_{SECRET}",
    f"sk-{SECRET}",
    f"sk-proj-{SECRET}",
    f"ghp_{SECRET}{SECRET}",
    f"github_pat_{SECRET}",
    "AKIA" + SECRET.upper(),
    f"https://ann:{SECRET}@host/x",
    f"https://host/x?access_token={SECRET}&y=1",
    f"xoxb-{SECRET}",
    f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    f'+    def f(api_key: str = "{SECRET}") -> None:',
    f"aws_secret_access_key={SECRET}",
    f"secret = '{SECRET}'",
    f"ValueError: token={SECRET} was refused",
]
ALIKE = [
    "runs_dir=/etc/passwd: a folder is needed",
    "models/token: no such file",
    "max_tokens=128",
    "rollout.max_new_tokens=384",
    "rollout.tokens=5",
    "tokenizer: my/tokenizer",
    "eos_token='</s>'",
    "pad_token: <pad>",
    "sampling/tokens_per_second 1234.5",
    "key=lambda x: x[0]",
    "sorted(rows, key=len)",
    "sort_key=name",
    "objective.ratio=token",
    "aggregation: token_mean",
    "token=tokens[i]",
    "token: int",
    "def f(token: str, api_key: str)",
    "password = getpass.getpass()",
    "api_key=os.environ['KEY']",
    "reward.api_key=${oc.env:API_KEY}",
    "API_KEY=$API_KEY",
    "hf_hub_download",
    "hf_transformers",
    "sk-learn",
    "task-1234567890",
    "Bearer authentication",
    "the bearer of bad news",
    "api_key: null",
    "token: 42",
    "secret=false",
    "https://host/x",
    "primary_key=id",
    "HF_HUB_OFFLINE=1",
    "keyboard=qwerty",
    "secretary: Ann",
    "passwords are hashed",
    "the token of a text",
    "monkey=banana",
    "by_token=true",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_hidden_in_any_text(text: str) -> None:
    for line in (text, f"before {text} after", f"x\n{text}\ny"):
        hidden = redact(line)
        assert SECRET not in hidden and SECRET.upper() not in hidden and HIDDEN in hidden
        assert redact(hidden) == hidden


@pytest.mark.parametrize("text", ALIKE)
def test_a_word_that_only_looks_alike_is_not_hidden(text: str) -> None:
    assert redact(text) == text
    assert redact(f"before {text} after") == f"before {text} after"


def test_a_value_ends_where_its_word_does() -> None:
    words = [
        "run",
        f"reward.api_key={SECRET} b",
        "--token",
        f"{SECRET} c",
        "+x.password=a b",
        "R=4",
        "rollout.tokens=3",
    ]
    hidden = ["run", "reward.api_key=***", "--token", "***", "+x.password=***", "R=4", "rollout.tokens=3"]
    assert redact_words(words) == hidden


CONFIG = {
    "R": 4,
    "rollout": {"max_new_tokens": 32, "tokens": 5},
    "reward": {
        "_target_": "my.judge",
        "api_key": f"{SECRET} with spaces",
        "headers": {"Authorization": SECRET},
        "keys": [1],
    },
    "tracking": {"uri": f"https://ann:{SECRET}@host/x"},
    "task": {"prompt": "say hf_transformers", "stop": [f"Bearer {SECRET}"], "token": "${oc.env:TOKEN}"},
}


def test_a_configuration_is_written_without_its_secrets_and_for_its_owner_alone(tmp_path: Path) -> None:
    write_config(tmp_path, CONFIG)
    text = (tmp_path / "config.yaml").read_text()
    assert SECRET not in text and (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o600
    written = yaml.safe_load(text)
    assert written["reward"]["api_key"] == HIDDEN and written["tracking"]["uri"] == "https://***@host/x"
    assert written["rollout"] == CONFIG["rollout"] and written["task"]["token"] == "${oc.env:TOKEN}"
    assert holds_hidden(written) and not holds_hidden(CONFIG)
    assert CONFIG["reward"]["api_key"] == f"{SECRET} with spaces"  # the run itself keeps it
    write_config(tmp_path, {"R": 4, "rollout": CONFIG["rollout"]})
    mask = os.umask(0)
    os.umask(mask)
    assert (tmp_path / "config.yaml").stat().st_mode & 0o777 == 0o666 & ~mask
    assert redact_mapping({"R": 4, "x": [1.5, None, True]}) == {"R": 4, "x": [1.5, None, True]}


def test_what_a_run_writes_of_its_source_and_status_holds_no_secret(tmp_path: Path) -> None:
    write(tmp_path, Source(diff=redact(f'+api_key = "{SECRET}"\n'), command=f"run --api-key {SECRET}"))
    assert (tmp_path / "source.diff").stat().st_mode & 0o777 == 0o600
    write_status(tmp_path, RunStatus("failed", command=f"run token={SECRET}", error=f"401: Bearer {SECRET}",
                                     notes=[f"password={SECRET}"]))  # fmt: skip
    for path in tmp_path.iterdir():
        assert SECRET not in path.read_text(), path
    assert read_status(tmp_path).error == "401: Bearer ***"


def test_an_address_that_lost_its_password_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"kind": "mlflow", "uri": "https://***@host/x", "experiment": "study"}
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="keeps no password; give uri="):
        mirror.settings(given, None, None, None)
    assert mirror.settings(given, None, "https://a:b@host/x", None).uri == "https://a:b@host/x"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://a:b@host/x")
    assert mirror.settings(given, None, None, None).uri is None  # the tracker takes it from there


@pytest.mark.parametrize("name", ["max_tokens", "tokens", "tokenizer", "token_count", "key", "", "keys", "n_tokens"])
def test_names_that_hold_no_secret(name: str) -> None:
    assert not is_secret_name(name)


@pytest.mark.parametrize("part", ["a", "a-", "a.", "a ", "k=${", "k='", 'k="', "--a ", "a:", "a = b, ", "://a", "sk-a"])
def test_a_long_text_takes_no_longer_per_character(part: str) -> None:
    """A checkout's diff may hold a file without a space or a line's end: the work grows with its length alone."""

    def seconds(length: int) -> float:
        text = part * (length // len(part))
        began = time.process_time()
        redact(text)
        return time.process_time() - began

    short = max(seconds(20_000), 0.01)
    assert seconds(400_000) < 100 * short, "20 times the length; its square is 400"
