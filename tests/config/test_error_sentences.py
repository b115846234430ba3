"""Every wrong command gives one sentence with the key, the value and what is allowed; exit code 2; nothing started."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_sweeps.run import main

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data" / "gsm8k_sample"
STRICT = "grpo_sweeps.rewards.exact_match.strict"
CORRECT = "grpo_sweeps.rewards.verdicts.correct"
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
# command -> words that its sentence must hold
CASES: dict[str, tuple[str, ...]] = {
    # keys
    "trainer.lrr=1": ("trainer.lrr=1: no such key", "did you mean trainer.lr?", "allowed in trainer: steps"),
    "lr=1e-4": ("lr=1e-4: no such key", "did you mean trainer.lr?"),
    "steps=3": ("steps=3: no such key", "did you mean trainer.steps?"),
    "stps=3": ("stps=3: no such key", "did you mean trainer.steps?"),
    "model.path=/x=y": ("cannot be read as KEY=VALUE", "within the shell's quotes: 'model.path=\"/x=y\"'"),
    "modle=tiny": ("modle=tiny: no such key", "did you mean model?", "aggregation"),
    "+trainer.foo=1": ("trainer.foo=1: no such key", "micro_batch"),
    "+foo=1": ("foo=1: no such key", "allowed here: R, seed"),
    "model.lora.q=1": ("model.lora.q=1: no such key", "r, alpha, targets"),
    "~trainer.foo": ("~trainer.foo: there is no such key to drop",),
    "+R=3": ("+R: is there already; write R=VALUE without the +",),
    "+model=tiny": ("+model: has a choice already; write model=CHOICE without the +",),
    "hydra.launcher.partition=x": ("hydra.launcher.partition=x", "hydra/launcher=submitit_slurm"),
    "-m hydra/launcher=submitit_slurm R=2 hydra.launcher.partitoin=x": ("did you mean hydra.launcher.partition?",),
    "rollout.top_p=0.9": ("rollout.top_p=0.9: top-p is not offered",),
    "+rollout.top_k=5": ("rollout.top_k=5: top-k is not offered",),
    "reward=random reward.q=1": ("reward.q=1: no such key", "allowed in reward: p", "+reward.q=1"),
    "+reward.q=1": ("reward.q=1", "takes no argument of that name", "~reward.q"),
    # of all runs of a command
    "-m R=2,3 sweep=s${R}": ("sweep=s2,s3: the same for all runs of a command is needed",),
    "-m R=2,3 runs_dir=o${R}": ("runs_dir=o2,o3: the same for all runs",),
    "-m R=2 trainer.steps=2,4": ("trainer.steps=2,4", "give the larger number"),
    "-m R=2 hydra.sweeper.max_batch_size=1": ("hydra.sweeper.max_batch_size=1: null is allowed",),
    "-m R=range(1,1e9)": ("R=range(1,1e9): at most 10000 runs",),
    # what only Hydra sees
    "trainer=[1,2]": ("a group takes the name of a choice, GROUP=CHOICE",),
    "trainer.betas=[null,0.1]": ("trainer.betas", "null is not allowed"),
    "--multirun --run": ("--run", "--multirun"),
    # sizes
    "R=100000000": ("R=100000000: at most 65536 is allowed",),
    "trainer.prompts=100000": ("trainer.prompts=100000: at most 65536",),
    "model.lora.r=100000": ("model.lora.r=100000: at most 4096",),
    f"runs_dir={'x' * 300}": ("runs_dir=xxx", "a folder is needed"),
    f"model.path={'x' * 5000} dry_run=true": ("model.path=xxx", "...: a path that the file system can hold is needed"),
    f"task=gsm8k task.path={'x' * 5000} dry_run=true": ("task.path=xxx", "...: a path that the file system can hold"),
    f"model={'x' * 5000}": ("model=xxx", "...: a name of at most 255 bytes is needed"),
    f"+sweeps={'x' * 5000}": ("+sweeps=xxx", "...: a name of at most 255 bytes is needed"),
    f"--config-dir {'x' * 5000} R=2": ("--config-dir xxx", "...: a name of at most 255 bytes is needed"),
    # ranges that a function's signature declares, in a dry run as well
    "reward=random reward.p=2": ("reward.p=2: a number from 0 to 1 is needed",),
    "-m R=2,4 reward=random reward.p=-0.5,0.5 dry_run=true": ("reward.p=-0.5: a number from 0 to 1 is needed",),
    "estimator=grpo_std estimator.ddof=2 dry_run=true": ("estimator.ddof=2: a number from 0 to 1 is needed",),
    "estimator=dapo estimator.eps=-1": ("estimator.eps=-1: 0 or more is needed",),
    "estimator=reinforce_plus_plus estimator.ddof=-1": ("estimator.ddof=-1: a number from 0 to 1",),
    "task.n_train=0 dry_run=true": ("task.n_train=0: 1 or more is needed",),
    "task.max_number=2 dry_run=true": ("task.max_number=2: 3 or more is needed",),
    # given twice
    "R=2 R=4": ("R=2 R=4: R is given twice; give it once (with -m, R=A,B is an axis)",),
    "-m R=2 seed=0 R=4,8": ("R=2 R=4,8: R is given twice",),
    "trainer.lr=1 seed=0 ++trainer.lr=1 trainer.lr=2": ("trainer.lr=1 ++trainer.lr=1 trainer.lr=2: ", "given 3 times"),
    # types
    "R=x": ("R=x: an integer is expected",),
    "trainer.lr=abc": ("trainer.lr=abc: a number is expected",),
    "trainer.steps=2.5": ("trainer.steps=2.5: an integer is expected",),
    "trainer.lr=null": ("trainer.lr=null: a value is needed",),
    "model.random=maybe": ("model.random=maybe: true or false is expected",),
    "model.lora=3": ("model.lora=3: a group of keys is expected", "r, alpha, targets"),
    "trainer.betas=3": ("trainer.betas=3: a list is expected",),
    "trainer=3": ("a group takes the name of a choice",),
    "task.stop=abc": ("task.stop='abc': a list of strings is expected",),
    "estimator=grpo_std estimator.ddof=x": ("estimator.ddof=x", "type int"),
    "model.path=${nothing}": ("${nothing}", "not found"),
    # choices
    "model=foo": ("model=foo: no such choice; model is one of ", "llama_nemotron_nano_4b", "tiny"),
    "tracking=wandb": ("tracking=wandb: no such choice; tracking is one of ", "custom", "local", "mlflow"),
    "hydra/launcher=slurm": ("hydra/launcher is one of basic, submitit_local, submitit_slurm",),
    "tracking.kind=wandb": ("tracking.kind=wandb: choose one of mlflow, local",),
    "model.dtype=int8": ("model.dtype=int8: choose one of float32, bfloat16",),
    "model.attention=magic": ("model.attention=magic: choose one of sdpa, eager",),
    "trainer.schedule=step": ("trainer.schedule=step: choose one of constant, linear, cosine",),
    "aggregation=mean": ("aggregation=mean: choose one of sum, length, token_mean, constant",),
    "analysis.groups=some": ("analysis.groups=some: choose one of mixed, all",),
    "analysis.by=head": ("analysis.by=head: choose one of whole, layer, parameter",),
    "analysis.scores=some": ("analysis.scores=some: true or false is expected",),
    "redo=maybe": ("redo=maybe: choose one of null, failed, stale, all",),
    "trainer.device=tpu": ("trainer.device=tpu: choose one of auto, cpu, cuda",),
    "+sweeps=unknown": ("+sweeps=unknown: no such choice; sweeps is one of ", "default", "paper_table1"),
    "sweeps=unknown": ("+sweeps=unknown: no such choice",),
    # ranges
    "R=0": ("R=0: at least 1 is needed",),
    "seed=-1": ("seed=-1",),
    "trainer.lr=-1": ("trainer.lr=-1.0: at least 0 is needed",),
    "trainer.lr=nan": ("trainer.lr=nan: a finite number is needed",),
    "trainer.steps=0": ("trainer.steps=0: at least 1",),
    "trainer.betas=[1]": ("trainer.betas=[1.0]: two numbers",),
    "rollout.engine=graph trainer.device=cpu": ("rollout.engine=graph: it needs a CUDA GPU", "trainer.device is cpu"),
    "rollout.temperature=0": ("rollout.temperature=0.0: a number above 0",),
    "R=1": ("R=1: the baseline of estimator=grpo needs at least R=2", "estimator=reinforce"),
    "R=1 estimator=grpo_std": ("estimator=grpo_std",),
    "R=1 estimator=rloo": ("estimator=rloo",),
    "R=1 estimator=reinforce_plus_plus_baseline": ("estimator=reinforce_plus_plus_baseline needs at least R=2",),
    "R=1 trainer.prompts=1 estimator=batch_mean": ("trainer.prompts=1: the baseline of estimator=batch_mean needs",),
    "estimator=opo +estimator.lengths_GR=3": ("estimator.lengths_GR=3: each step gives it", "~estimator.lengths_GR"),
    "R=4 trainer.micro_batch=6": ("trainer.micro_batch=6: whole groups are needed: a multiple of R=4",),
    "R=4 trainer.micro_batch=0": ("trainer.micro_batch=0", "1 to 3 rows to run each group in parts"),
    "analysis.every=-1": ("analysis.every=-1: at least 0",),
    "analysis.stacked_every=-1": ("analysis.stacked_every=-1: at least 0",),
    "R=8 analysis.stacked_every=1": ("analysis.stacked_every=1", "one micro-batch: trainer.micro_batch=128, or 0 here"),
    "objective=trpo": ("objective=trpo: no such choice; objective is one of ", "gspo", "ppo_clip", "reinforce"),
    "objective.ratio=tokens": ("objective.ratio=tokens: choose one of none, token, sequence",),
    "objective.clip=0.1": ("objective.clip=0.1: no such key", "clip_low"),
    "objective.clip_low=1.5": ("objective.clip_low=1.5: a number above 0 and at most 1 is needed",),
    "objective.clip_high=0": ("objective.clip_high=0.0: a number above 0 is needed",),
    "objective.inner_updates=0": ("objective.inner_updates=0: at least 1 is needed",),
    "objective.inner_updates=100000": ("objective.inner_updates=100000: at most 1024 is allowed",),
    "objective.minibatches=0": ("objective.minibatches=0: at least 1 is needed",),
    "objective.minibatches=3": ("objective.minibatches=3", "a divisor of the step's 16 groups is needed"),
    "objective=gspo trainer.prompts=6": ("objective.minibatches=4", "a divisor of the step's 6 groups is needed"),
    "objective.kl_beta=-1": ("objective.kl_beta=-1.0: at least 0 is needed",),
    "objective.kl_beta=inf": ("objective.kl_beta=inf: a finite number is needed",),
    "objective.kl_estimator=k4": ("objective.kl_estimator=k4: choose one of k1, k2, k3",),
    "objective.kl_place=both": ("objective.kl_place=both: choose one of loss, reward",),
    "objective.critic=true": ("objective.critic=true", "estimator=reinforce is needed"),
    "estimator=grpo_std objective=ppo": ("objective.critic=true", "estimator=reinforce is needed"),
    "objective.gae_lambda=1.5": ("objective.gae_lambda=1.5: a number from 0 to 1 is needed",),
    "objective.gae_gamma=-1": ("objective.gae_gamma=-1.0: a number from 0 to 1 is needed",),
    "objective.critic_lr=-1": ("objective.critic_lr=-1.0: at least 0 is needed",),
    "objective.critic_updates=0": ("objective.critic_updates=0: at least 1 is needed",),
    "objective.continuations=-1": ("objective.continuations=-1: at least 0 is needed",),
    "objective.continuations=100000": ("objective.continuations=100000: at most 4096 is allowed",),
    "objective.continuations=8": ("objective.continuations=8", "estimator=reinforce is needed"),
    "estimator=rloo objective=vine": ("objective.continuations=8", "estimator=reinforce is needed"),
    "objective=ppo objective.continuations=8": ("objective.continuations=8", "objective.critic=false is needed"),
    "objective=vine objective.critic=true": ("objective.continuations=8", "objective.critic=false is needed"),
    "objective=vine objective.value_every=-1": ("objective.value_every=-1: at least 0 is needed",),
    "objective.value_every=8": ("objective.value_every=8: objective.continuations=1 or more is needed",),
    "objective=vine objective.kl_beta=0.1 objective.kl_place=reward": (
        "objective.value_every=8",
        "objective.kl_place=loss is needed",
    ),
    "estimator=bnpo objective.kl_beta=0.1 objective.kl_place=reward": (
        "objective.kl_place=reward: estimator=bnpo takes rewards from 0 to 1",
        "loss is needed",
    ),
    "objective.resample=maybe": ("objective.resample=maybe: true or false is expected",),
    "objective.resample_rounds=0": ("objective.resample_rounds=0: at least 1 is needed",),
    "R=1 estimator=reinforce objective.resample=true": ("objective.resample=true", "R=2 or more is needed"),
    "sweep=a/b": ("sweep=a/b: a sweep's name becomes a folder",),
    f"sweep={'x' * 5000}": (f"sweep={'x' * 80}...: a sweep's name becomes a folder",),
    "sweep=..": ("sweep=..: a sweep's name becomes a folder",),
    "budget=tokens": ("budget=tokens: choose one of prompts, rollouts",),
    "reward_timeout=0": ("reward_timeout=0.0: seconds above 0 are needed, or null for no limit",),
    "reward_timeout=soon": ("reward_timeout",),
    "budget_R=0": ("budget_R=0: at least 1",),
    "R=3 budget=rollouts": ("R=3: budget=rollouts has", "16 x 4 = 64 rollouts a step", "a divisor of that is needed"),
    "-m R=2,4,128 budget=rollouts": ("R=128: budget=rollouts has",),
    "R=2 budget=rollouts budget_R=64 task.n_train=500": ("512 groups a step by budget=rollouts: the task has 500",),
    # verdicts, own data and rewards
    "task.verdict=maybe": ("task.verdict=maybe: choose one of numbers, exact, choice, math, none",),
    "task.verdict=choice": ("task.verdict=choice: the answer '", "of problem arithmetic-", "one letter from A to E is"),
    "task.verdict=math": ("task.verdict=math: needs the package math-verify (pip install 'grpo_sweeps[math]')",),
    "task.verdict=nothing.here": ("task.verdict=nothing.here: cannot be imported",),
    "task.verdict=math.pi": ("task.verdict=math.pi: is a float; a function is needed",),
    "task.verdict=math.sqrt": ("task.verdict=math.sqrt: must be callable with 2 positional arguments",),
    "task.verdict=operator.concat": ("task.verdict=operator.concat: fails on the reference answer of problem arith",),
    "task.verdict=collections.ChainMap": ("task.verdict=collections.ChainMap: gave ChainMap(", "true or false is"),
    f"reward=several +reward.functions.a._target_={CORRECT} +reward.functions.a.verdict=half": (
        "reward.functions.a.verdict=half: choose one of numbers, exact, choice, math, or give the dotted path",
    ),
    f"reward=several +reward.functions.a._target_={CORRECT} +reward.functions.a.verdict=nothing.here": (
        "reward.functions.a.verdict=nothing.here: cannot be imported",
    ),
    "reward=correct task.verdict=none": ("reward.verdict=none: task.verdict=none has nothing to compare with",),
    "reward=correct reward.verdict=half": ("reward.verdict=half: choose one of numbers, exact, choice, math",),
    "task=jsonl": ("task.path",),
    "task=jsonl task.path=nowhere": (
        "task.path=nowhere: is not there",
        "a folder with train.jsonl and test.jsonl is needed, or one file",
    ),
    f"task=jsonl task.path={DATA} dry_run=true": ("trainer.prompts=16: the task has 3 training problems",),
    f"task=jsonl task.path={DATA} reward=exact_match dry_run=true": (
        "reward._target_=grpo_sweeps.rewards.exact_match.strict: the answer 'The baker",
        "of problem train-1",
        "reward=correct",
    ),
    f"task=jsonl task.path={DATA} task.answer=reply dry_run=true": (
        "task.answer=reply: ",
        "train.jsonl line 1 has no such column",
        "it has question, answer",
    ),
    "reward=several": ("reward.functions={}: one function or more is needed", "+reward.functions.NAME._target_="),
    "reward=several +reward.functions.a.weight=1": ("reward.functions.a._target_=None: the dotted path of a function",),
    f"reward=several +reward.functions.strict._target_={STRICT}": (
        "reward.functions.strict: reward/strict is another",
    ),
    f"reward=several +reward.functions.a._target_={STRICT} +reward.functions.a.weight=x": (
        "reward.functions.a.weight=x: a number is needed",
    ),
    f"reward=several +reward.functions.a._target_={STRICT} +reward.functions.a.q=1": (
        "reward.functions.a.q=1",
        "takes no argument of that name",
        "~reward.functions.a.q",
    ),
    "+reward.per=step": ("reward.per=step: choose one of rollout, group, batch, trl",),
    "task.system=hello": (
        "task.system=hello: ",
        "model.chat_template=true is needed; without one write it into task.prompt",
    ),
    "task.few_shot=[{question:a,answer:b}]": ("task.few_shot=[{", "without one write the examples into task.prompt"),
    "task.few_shot=[{question:a}]": ("task.few_shot={'question': 'a'}: each example needs a question and an answer",),
    "task.few_shot=hello": ("task.few_shot=hello: a list of examples is expected",),
    "task.assistant_prefix=3": ("task.assistant_prefix=3: a text is needed, or null",),
    "+model.chat_template_kwargs.x=1": ("model.chat_template_kwargs={'x': 1}: ", "model.chat_template=true is needed"),
    "+model.chat_template_kwargs.tokenize=true": ("model.chat_template_kwargs.tokenize=true: the run sets it itself",),
    "model.chat_template_kwargs=3": ("model.chat_template_kwargs",),
    "reward_retries=-1": ("reward_retries=-1: at least 0 is needed",),
    "reward_on_failure=skip": ("reward_on_failure=skip: choose one of stop, zero",),
    "rollout.cut=drop": ("rollout.cut=drop: choose one of keep, mask",),
    "rollout.cut_penalty=-1": ("rollout.cut_penalty=-1.0: at least 0 is needed",),
    "trainer.tokens=0": ("trainer.tokens=0: a number of tokens of at least 1 is needed, or null",),
    "trainer.tokens=many": ("trainer.tokens=many: an integer",),
    "rollout.cut_buffer=-1 rollout.cut_penalty=1": ("rollout.cut_buffer=-1: 0 is needed, or fewer tokens than",),
    "rollout.cut_buffer=32 rollout.cut_penalty=1": (
        "rollout.cut_buffer=32: 0 is needed, or fewer tokens than rollout.max_new_tokens=32",
    ),
    "rollout.cut_buffer=8": ("rollout.cut_buffer=8: the penalty that grows is rollout.cut_penalty, which is 0",),
    "estimator=bnpo rollout.cut_penalty=1": ("rollout.cut_penalty=1.0: estimator=bnpo takes rewards from 0 to 1",),
    "objective=vine rollout.cut_penalty=1": ("rollout.cut_penalty=1.0", "0 is needed"),
    f"-m objective.continuations=2,0 estimator=reinforce reward=custom reward._target_={STRICT} +reward.per=group": (
        f"reward._target_={STRICT}: it is called with a whole group",
        "called per rollout is needed",
    ),
    "analysis.own_metrics=[math.sqrt]": (
        "analysis.own_metrics=math.sqrt: must be callable with 4 positional arguments",
    ),
    "analysis.own_metrics=[nothing.here]": ("analysis.own_metrics=nothing.here: cannot be imported",),
    # paths and functions
    "model.path=./nothing": ("model.path=./nothing: no such file or folder",),
    "model.path=a/b/c": ("model.path=a/b/c: no such file or folder",),
    "model.path=.": ("model.path=.: the folder has no config.json",),
    "task=gsm8k task.path=nowhere": ("task.path=nowhere: a folder with readable train.jsonl and test.jsonl",),
    "runs_dir=/etc/passwd": ("runs_dir=/etc/passwd: a folder is needed", "/etc/passwd is none"),
    "runs_dir=/etc/passwd/runs dry_run=true": ("runs_dir=/etc/passwd/runs: a folder is needed", "/etc/passwd is none"),
    "runs_dir=/proc/x": ("runs_dir=/proc/x: a folder is needed", "/proc cannot be written"),
    "-m R=2,4 runs_dir=/proc/x dry_run=true": ("runs_dir=/proc/x: a folder is needed", "/proc cannot be written"),
    "trainer.device=cuda:99": ("trainer.device=cuda:99: this machine has",),
    "-m R=2,4 trainer.device=cuda:99": ("trainer.device=cuda:99: this machine has",),
    "task.n_train=4 trainer.prompts=5": ("trainer.prompts=5: the task has 4 training problems",),
    "-m task.n_train=8 trainer.prompts=5,9": ("trainer.prompts=9: the task has 8 training problems",),
    "task.n_held_out=4 trainer.eval_every=1 trainer.eval_problems=5": ("trainer.eval_problems=5: the task has 4",),
    "task._target_=builtins.dict ~task.n_train ~task.n_held_out": ("task=builtins.dict: returns a dict",),
    "task.prompt=hello": ("task.prompt='hello': must be a text that contains {question}",),
    "task.chat_prompt=hello": ("task.chat_prompt='hello': must be a text that contains {question}",),
    "task.chat_prompt=3": ("task.chat_prompt=3: must be a text that contains {question}",),
    "task=custom": ("task._target_: a value is required",),
    "reward=custom": ("reward._target_: a value is required", "my_module.my_function"),
    "reward._target_=nope.nope": ("reward._target_=nope.nope: cannot be imported",),
    "reward._target_=nope": ("reward._target_=nope: a dotted path",),
    "tracking.uri=http://me:secret@host": ("tracking.uri: must hold no user name or password",),
    # launching
    "R=2,4": ("R=2,4: several values are a sweep; add -m",),
    "R=range(2,4)": ("R=range(2,4): several values are a sweep; add -m",),
    "hydra/launcher=submitit_slurm": ("hydra/launcher=submitit_slurm: needs -m",),
    "hydra/launcher=submitit_local": ("hydra/launcher=submitit_local: needs -m",),
    "-m R=2,4 hydra/launcher=submitit_slurm": ("sbatch and srun not found on this machine",),
    "-m R=2,4 hydra/launcher=submitit_local hydra.launcher.nodes=2": ("hydra.launcher.nodes=2",),
    "+sweeps=default,paper_table1": ("one sweep at a time",),
    "+sweeps=default +sweeps=paper_table1": ("one sweep at a time",),
    "-m R=2,4 model=tiny,foo": ("model=foo: no such choice",),
    "-m R=range(2,1)": ("R=range(2,1): gives no value",),
    "-m R=2,4 seed=range(1,1)": ("seed=range(1,1): gives no value",),
    "task=arithmetic task=gsm8k": ("task=arithmetic task=gsm8k: two choices of one group",),
    "-m hydra/launcher=basic hydra/launcher=submitit_local": ("two choices of one group",),
    "~trainer": ("~trainer: a run needs a choice of trainer",),
    "~model=tiny": ("~model=tiny: a run needs a choice of model",),
    "-m R=2,1": ("R=1: the baseline",),
    "-m hydra.verbose=true,false": ("hydra.verbose=true,false: keys of hydra cannot be an axis",),
    "-m trainer.lr=interval(0,1)": ("cannot be an axis here; choices (a,b,c) and range(start,stop)",),
    "+sweeps=default seed=0,1 trainer.micro_batch=6": ("trainer.micro_batch=6", "a multiple of R=4"),
    "+sweeps=default -m R=1": ("R=1: the baseline",),
    # the command itself
    "R=[1": ("R=[1: cannot be read as KEY=VALUE",),
    "R": ("R: cannot be read as KEY=VALUE",),
    "--resolve": ("--resolve: belongs to --cfg",),
    "--nope": ("unrecognized arguments: --nope; see python -m grpo_sweeps.run --help",),
    "-m --nope R=2": ("unrecognized arguments: --nope",),
    "--config-dir /nonexistent R=2": ("/nonexistent",),
}


@pytest.mark.parametrize("command", CASES)
def test_one_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(shlex.split(command)) == 2
    captured = capfd.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1, captured.err
    for words in CASES[command]:
        assert words in captured.err
    assert "secret" not in captured.err and not captured.out
    assert not list(tmp_path.iterdir()), "something was written before the error"


def test_mlflow_missing_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from grpo_sweeps.config import checks

    found = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "mlflow" else found(name))
    monkeypatch.chdir(tmp_path)
    assert main(["R=4"]) == 2
    assert "tracking=mlflow: the package mlflow is not installed; install it, or choose tracking=local" in (
        capfd.readouterr().err
    )
    assert main(["R=4", "tracking=local", "dry_run=true"]) == 0


def test_broken_yaml_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("name: [mine\n")
    (tmp_path / "model" / "list.yaml").write_text("lr: 3\n")
    monkeypatch.chdir(tmp_path)
    for choice in ("mine", "list"):
        assert main(["--config-dir", ".", f"model={choice}"]) == 2
        err = capfd.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1
        assert choice in err or "lr" in err


@pytest.mark.parametrize("command", ["--help", "R=0", "trainer.lrr=1", "-m R=2,1", "+sweeps=unknown", "--cfg job"])
def test_quick_answers_import_neither_torch_nor_mlflow(command: str, tmp_path: Path) -> None:
    program = (
        "import sys; from grpo_sweeps.run import main; code = main(sys.argv[1:]); "
        "print(); print(code, sorted({'torch', 'mlflow', 'pandas', 'transformers', 'submitit'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *shlex.split(command)],
        capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, check=True,
    )  # fmt: skip
    code = 0 if command.startswith("--") else 2
    assert done.stdout.splitlines()[-1] == f"{code} []", done.stderr


def test_help_shows_groups_sweeps_and_examples(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "grpo_sweeps.run", "--help"],
        capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT, check=True,
    )  # fmt: skip
    for group in (path for path in (ROOT / "conf").iterdir() if path.is_dir() and path.name != "hydra"):
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(f"{group.name}: ")]
        assert set(line.partition(": ")[2].split(", ")) == {path.stem for path in group.glob("*.yaml")}
    assert "+sweeps=paper_table1: model=nemotron_mini_4b task=gsm8k R=2,4,8 seed=0,1,2" in done.stdout
    assert "+sweeps=paper_table1_tiny: R=2,4,8 seed=0,1,2" in done.stdout
    assert "hydra/launcher: basic, submitit_local, submitit_slurm" in done.stdout
    assert done.stdout.count("  python -m grpo_sweeps.run ") == 3
