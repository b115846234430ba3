"""Makes the embedded model: a small Llama with a character tokenizer, trained on worked arithmetic.

Supervised cross-entropy on "prompt + solution + end of text"; held-out problems of the task never occur in it, for any
seed of the task. Training stops at the first evaluation where at least `low` of the sampled answers (temperature 1,
strict parsing) are right, so that a policy gradient has room to improve it. The same command on the same device and
library versions makes the same weights; elsewhere they differ by rounding, and the stop can fall on another evaluation.
Exit code 0; 1 when the accuracy window was not met; 2 for a bad command.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from grpo_sweeps import cli
from grpo_sweeps.rewards.parsing import verdict
from grpo_sweeps.tasks.arithmetic import arithmetic
from grpo_sweeps.types import ConfigError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

PROMPT = "Question: {question}\nAnswer:"
STOP = ("\nQuestion:",)
SPECIALS = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(chr(code) for code in range(32, 127))
TASK_SEED = 1_000_003  # seed of the pretraining problems; runs use small seeds


@dataclass(frozen=True)
class Options:
    """The command's keys."""

    out: str = cli.key("", "where the model is written", "FOLDER", required=True)
    steps: int = cli.key(3000, "the most steps of the optimizer", least=1)
    device: str = cli.key("cpu", "where it is trained", "cpu|cuda|cuda:N")
    seed: int = cli.key(0, "of weights and batches", least=0, most=cli.MOST_SEED)
    batch: int = cli.key(64, "problems per step", least=1)
    lr: float = cli.key(4e-4, "learning rate", least=0)
    warmup: int = cli.key(200, "steps over which the learning rate rises", least=1)
    problems: int = cli.key(200_000, "problems to draw batches from", least=1)
    prompt_weight: float = cli.key(0.1, "weight of a prompt's tokens in the loss; 1 for those of the solution", least=0)
    eval_every: int = cli.key(100, "steps between evaluations", least=1)
    eval_problems: int = cli.key(256, "held-out problems per evaluation", least=1)
    low: float = cli.key(0.38, "sampled accuracy at which training stops")
    high: float = cli.key(0.50, "sampled accuracy above which there is too little left to learn")


COMMAND = cli.Command(
    "python -m grpo_sweeps.pretrain_tiny",
    Options,
    __doc__ or "",
    "{word!r} is not allowed: give key=value with a key of {allowed}.",
    wrong="{key}={value!r} is not allowed: {needed} is needed.",
    each="{key}",
    last=", ",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point. Exit code 0; 1 when the accuracy window was not met; 2 for a bad command."""
    return cli.run(COMMAND, arguments, _make)


def _make(options: Options) -> int:
    if not options.out:
        raise ConfigError("out is missing: give out=FOLDER, where the model is written.")
    _check_device(options.device)
    try:
        Path(options.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"out={options.out}: cannot be made ({error.strerror}); give a folder.") from error
    last = pretrain(options)[-1]["accuracy"]
    if options.low <= last <= options.high:
        return 0
    print(
        f"The sampled accuracy is {last:.3f}, outside low={options.low} to high={options.high}: "
        "raise steps, or lower eval_every to stop in between.",
        file=sys.stderr,
    )
    return 1


def _check_device(device: str) -> None:
    """Raise ConfigError for a device that is none, or that this machine does not have."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ConfigError(f"device={device!r} is not allowed: cpu, cuda or cuda:N is needed.")
    import torch

    index = int(device.partition(":")[2] or 0)
    if device != "cpu" and index >= torch.cuda.device_count():
        raise ConfigError(
            f"device={device!r}: this machine has {torch.cuda.device_count()} CUDA devices; cpu is there."
        )


def pretrain(options: Options) -> list[dict[str, float]]:
    """Train, write model and tokenizer to `options.out`, and return the evaluations (also in pretrain_log.json)."""
    import torch

    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer).to(options.device)
    data = arithmetic(seed=TASK_SEED, n_train=options.problems, n_held_out=1)
    rows_NT, prompt_lengths_N = (tensor.to(options.device) for tensor in pack(data.train, tokenizer))
    held_out = arithmetic(n_train=1, n_held_out=options.eval_problems).held_out
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.98), weight_decay=0.01)
    generator = torch.Generator().manual_seed(options.seed)
    history: list[dict[str, float]] = []
    started = time.monotonic()
    for step in range(1, options.steps + 1):
        picked_B = torch.randint(len(rows_NT), (options.batch,), generator=generator).to(options.device)
        loss = weighted_loss(model, rows_NT[picked_B], prompt_lengths_N[picked_B], options.prompt_weight)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = options.lr * min(1.0, step / options.warmup)
        optimizer.step()
        if step % options.eval_every and step != options.steps:
            continue
        accuracy = evaluate(model, tokenizer, held_out, samples=1)
        seconds = time.monotonic() - started
        history.append({"step": step, "loss": loss.item(), "accuracy": accuracy, "seconds": seconds})
        print(f"step {step} loss {loss.item():.4f} sampled accuracy {accuracy:.3f} time {seconds:.0f} s", flush=True)
        save(model, tokenizer, Path(options.out), history)  # each time, so that an interrupted command leaves a model
        if accuracy >= options.low:
            break
    return history


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character: printable ASCII and newline, `<unk>` for others; `<eos>`, `<pad>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([*SPECIALS, *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of about 0.75 M parameters: grouped-query attention, tied head, float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def pack(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerFast) -> tuple[Tensor, Tensor]:
    """Token ids rows_NT of "prompt + solution + eos", padded on the right, and the lengths of the prompts (N,)."""
    import torch

    table = np.full(128, tokenizer.unk_token_id, dtype=np.int64)
    for character in CHARACTERS:
        table[ord(character)] = tokenizer.convert_tokens_to_ids(character)
    prompts = [PROMPT.format(question=problem.question) for problem in problems]
    texts = [f"{prompt} {problem.solution}" for prompt, problem in zip(prompts, problems, strict=True)]
    rows = np.full((len(texts), max(map(len, texts)) + 1), tokenizer.pad_token_id, dtype=np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = table[np.frombuffer(text.encode("ascii"), dtype=np.uint8)]
        row[len(text)] = tokenizer.eos_token_id
    return torch.from_numpy(rows), torch.tensor([len(prompt) for prompt in prompts])


def weighted_loss(model: LlamaForCausalLM, rows_BT: Tensor, prompt_lengths_B: Tensor, prompt_weight: float) -> Tensor:
    """Cross-entropy, weighted mean over tokens: 1 in solution and eos, `prompt_weight` in the prompt, 0 in padding.

    Padding is on the right, so that the causal mask alone keeps it out of every token that counts.
    """
    import torch

    logits_BTV = model(input_ids=rows_BT, use_cache=False).logits[:, :-1]
    targets_BT = rows_BT[:, 1:]
    losses_BT = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
    positions_T = torch.arange(1, rows_BT.shape[1], device=rows_BT.device)
    in_prompt_BT = positions_T < prompt_lengths_B[:, None]
    weights_BT = torch.ones_like(losses_BT).masked_fill(in_prompt_BT.flatten(), prompt_weight)
    weights_BT = weights_BT * (targets_BT != model.config.pad_token_id).flatten()
    return (losses_BT * weights_BT).sum() / weights_BT.sum()


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    samples: int,
    greedy: bool = False,
    batch: int = 512,
) -> float:
    """Share of completions that are right by strict parsing: `samples` per problem at temperature 1, or one greedy."""
    import torch

    right = total = 0
    repeats = 1 if greedy else samples
    for start in range(0, len(problems), batch):
        chunk = problems[start : start + batch]
        inputs = tokenizer([PROMPT.format(question=p.question) for p in chunk], return_tensors="pt", padding=True)
        with torch.no_grad():
            output_BT = model.generate(
                input_ids=inputs["input_ids"].to(model.device),
                attention_mask=inputs["attention_mask"].to(model.device),
                max_new_tokens=48,
                do_sample=not greedy,
                num_return_sequences=repeats,
                **({} if greedy else {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
            )
        texts = tokenizer.batch_decode(output_BT[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for index, text in enumerate(texts):
            right += verdict(text, chunk[index // repeats].answer).strict
        total += len(texts)
    return right / total


def save(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, history: list[dict[str, float]]
) -> None:
    """Write the model (safetensors, float32), the tokenizer, the generation defaults and the log of evaluations."""
    from transformers import GenerationConfig

    folder.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=48,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(folder)
    (folder / "pretrain_log.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
