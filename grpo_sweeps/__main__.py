"""The list of commands, `python -m grpo_sweeps` or `grpo-sweeps`, and `grpo-sweeps COMMAND ...`, which starts one."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from grpo_sweeps import cli
from grpo_sweeps.cli import say
from grpo_sweeps.text import did_you_mean

COMMANDS = {
    "run": "train one run, or a sweep with -m or +sweeps=NAME",
    "check": "try two steps of the same words first: does it work, what will it take",
    "status": "what has run, what runs, what is missing",
    "verify": "is every record, checkpoint and copy of a sweep whole",
    "cancel": "end what is queued or running of a sweep; the runs stay resumable",
    "report": "table, figures, claims and a page from the records of a sweep",
    "diff": "what differs between two runs: configuration, code, data, weights, versions",
    "credit": "what each token of a trained model's completions deserved",
    "control": "a group's spectrum beside that of supervised rows, for any model",
    "export": "write a trained model as a folder that transformers and vLLM load",
    "theory": "the claims on policies whose sequences can all be listed",
    "sync": "copy records that were made without a server to MLflow",
    "bench": "what the measurement costs on this machine, and how exact it is",
    "convert": "save a GGUF file once as safetensors, which load faster",
    "pretrain_tiny": "make the embedded model again",
}
ABOUT = "COMMAND --help says what a command takes; python -m grpo_sweeps.COMMAND is the same command."


@cli.piped
def main(argv: Sequence[str] | None = None) -> int:
    """Print the list, or replace this process by a command; the exit code is 2 for an unknown one."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser, _ = cli.parser_of("grpo-sweeps", "COMMAND [WORD] ...", ABOUT, cli.table(list(COMMANDS.items())), "commands")
    if not words:
        parser.print_help()
        return 0
    if cli.page_or_version(parser, words[:1]):
        return 0
    if words[0] not in COMMANDS:
        sentence = f"{words[0]}: no such command; allowed are {', '.join(COMMANDS)}"
        say(f"error: {did_you_mean(sentence, words[0], COMMANDS)}")
        return 2
    # The process becomes that of `python -m`: `cancel` knows a process of the package by the words that started it.
    os.execv(sys.executable, [sys.executable, "-m", f"grpo_sweeps.{words[0]}", *words[1:]])


if __name__ == "__main__":
    sys.exit(main())
