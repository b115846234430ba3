"""What each benchmark takes: the keys of `python -m grpo_sweeps.bench NAME`, torch not needed."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_sweeps.cli import key

DTYPES = "float64|float32|bfloat16|float16"
DEVICE = ("auto", "where it runs", "auto|cpu|cuda|cuda:N")
JSON = ("", "also write the numbers to this file", "PATH")
FORM = ("auto", "the form of the Gram of every weight", "NAME")
PROMPT = (1, "tokens at the start of a row that are not scored")
BLOCK_MB = (0.0, "size of the blocks of a weight's gradient; 0: the default of the device")
THREADS = (0, "threads of torch; 0: torch's own number")
REPEATS = (7, "measurements per median")
CHECKPOINTING = (False, "recompute activations in the backward pass")


class ModelOptions:
    """What the options of every benchmark of a whole model share; each has the fields in the order of its page."""

    model: str
    device: str
    dtype: str
    form: str
    block_mb: float
    threads: int

    @property
    def block_bytes(self) -> int | None:
        return int(self.block_mb * 2**20) or None


@dataclass(frozen=True)
class GramOptions(ModelOptions):
    """One step with and without the Gram of its rows, beside the other ways to the same: time, memory, error."""

    subjects: tuple[str, ...] = key(("plain", "ours"), "what is measured, or all", "NAME,NAME")
    model: str = key("tiny", "the shape of the model", "NAME")
    R: int = key(8, "rows per group")
    groups: int = key(1, "groups")
    T: int = key(128, "tokens per row")
    prompt: int = key(*PROMPT)
    device: str = key(*DEVICE)
    dtype: str = key("float32", "the type of the weights", DTYPES)
    form: str = key(*FORM)
    block_mb: float = key(*BLOCK_MB)
    checkpointing: bool = key(*CHECKPOINTING)
    threads: int = key(*THREADS, least=0)
    repeats: int = key(*REPEATS)
    json: str = key(*JSON)
    peak_of: str = key("", "the peak of memory of one subject alone, as the benchmark asks its own processes", "NAME")


@dataclass(frozen=True)
class GrowthOptions(ModelOptions):
    """How the cost of the Gram grows with R and T, as a figure."""

    model: str = key("tiny", "the shape of the model", "NAME")
    R: tuple[int, ...] = key((2, 4, 8, 16, 32), "rows of the one group")
    T: tuple[int, ...] = key((256, 512, 1024), "tokens per row")
    through: tuple[int, ...] = key((0, 0), "only pairs with this R or this T; 0,0: all pairs", "R,T")
    prompt: int = key(*PROMPT)
    device: str = key(*DEVICE)
    dtype: str = key("float32", "the type of the weights", DTYPES)
    form: str = key(*FORM)
    block_mb: float = key(*BLOCK_MB)
    checkpointing: bool = key(*CHECKPOINTING)
    threads: int = key(*THREADS, least=0)
    repeats: int = key(*REPEATS)
    json: str = key(*JSON)
    figure: str = key("", "where to draw the figure, a path without suffix", "PATH", unset="none is drawn")
    from_: str = key("", "a file that json=PATH wrote: nothing is measured", "PATH", word="from")


@dataclass(frozen=True)
class ErrorOptions(ModelOptions):
    """The exactness of the Gram on a model of real width."""

    model: str = key("nemotron_mini_4b", "the shape of the model", "NAME")
    layers: int = key(4, "layers of the model; 0: its own")
    vocabulary: int = key(8192, "tokens of its vocabulary; 0: its own")
    R: int = key(8, "rows of the one group")
    T: int = key(512, "tokens per row")
    prompt: int = key(*PROMPT)
    device: str = key(*DEVICE)
    dtype: str = key("bfloat16", "the type of the weights", DTYPES)
    form: str = key(*FORM)
    block_mb: float = key(*BLOCK_MB)
    threads: int = key(*THREADS, least=0)
    json: str = key(*JSON)


@dataclass(frozen=True)
class FormsOptions:
    """One weight by every form of its Gram, and which of them the rule of engine/gram/linear.py takes."""

    R: int = key(8, "rows of the one group")
    T: tuple[int, ...] = key((8, 16, 32, 64, 128, 256, 512, 1024), "tokens per row")
    device: str = key(*DEVICE)
    dtype: str = key("float32", "the type of the weights", DTYPES)
    repeats: int = key(*REPEATS)
    json: str = key(*JSON)


@dataclass(frozen=True)
class ShapesOptions:
    """Random shapes through every kernel entry against float64: worst error, paths taken, crashes."""

    count: int = key(1000, "how many shapes")
    seed: int = key(0, "of the shapes")
    dtype: str = key("bfloat16", "the type of rows and weights", DTYPES)
    device: str = key(*DEVICE)
    tokens: int = key(4096, "the most tokens of a row")
    work: float = key(1.4e11, "the most multiplications of a shape's forward")
    index: int = key(-1, "this shape alone; -1: all")
    workers: int = key(0, "processes; 0: 1 on a CPU and 8 on CUDA")
    json: str = key(*JSON)


@dataclass(frozen=True)
class RolloutOptions:
    """Tokens a second of our engines beside transformers' own generation, of fixed lengths, interleaved."""

    subjects: tuple[str, ...] = key(("graph", "eager", "generate"), "what is measured, or all", "NAME,NAME")
    model: str = key("tiny", "the shape of the model", "NAME")
    prompts: int = key(16, "different prompts")
    R: int = key(8, "rollouts of each")
    prompt: tuple[int, ...] = key((60, 200), "least and most tokens of a prompt", "LEAST,MOST")
    new: int = key(256, "tokens of each rollout")
    device: str = key(*DEVICE)
    dtype: str = key("bfloat16", "the type of the weights", DTYPES)
    threads: int = key(*THREADS, least=0)
    repeats: int = key(5, "measurements per median")
    json: str = key(*JSON)


@dataclass(frozen=True)
class StepOptions:
    """Seconds of a whole training step, by part, beside TRL's GRPOTrainer on the same prompts and rewards."""

    subjects: tuple[str, ...] = key(("graph", "eager"), "what is measured: graph, eager, trl", "NAME,NAME")
    model: str = key("tiny", "a choice of conf/model", "NAME")
    path: str = key("", "the folder of its weights", "FOLDER", unset="that of the choice")
    gsm8k: str = key("", "a folder with GSM8K's problems", "FOLDER", unset="the arithmetic task")
    prompts: int = key(16, "groups of a step")
    R: int = key(8, "rollouts of each")
    new: int = key(256, "the most tokens of a rollout")
    per_device: tuple[int, ...] = key((32, 64, 128), "TRL's batch sizes that are tried; the fastest counts", "N,N")
    device: str = key(*DEVICE)
    threads: int = key(*THREADS, least=0)
    steps: int = key(2, "steps of each subject in a round")
    repeats: int = key(3, "rounds; the first step of each is not counted")
    json: str = key(*JSON)


OPTIONS = {
    "gram": GramOptions,
    "growth": GrowthOptions,
    "error": ErrorOptions,
    "forms": FormsOptions,
    "shapes": ShapesOptions,
    "rollout": RolloutOptions,
    "step": StepOptions,
}
