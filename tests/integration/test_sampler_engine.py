"""A sampler engine from outside the package, chosen by its dotted path: a real run, and what is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from grpo_sweeps.config import ModelConfig, RolloutConfig
from grpo_sweeps.config.checks import check, check_functions
from grpo_sweeps.engine.policy import Policy, load_policy
from grpo_sweeps.engine.rollouts import Rollout, completion_text
from grpo_sweeps.engine.samplers import Checked, load
from grpo_sweeps.loop.train import train
from grpo_sweeps.loop.watch import Watch
from grpo_sweeps.run import main
from grpo_sweeps.sweep.identity import identity
from grpo_sweeps.tracking.local import read_groups, read_metrics, read_status
from grpo_sweeps.types import ConfigError
from tests.composing import run_config

pytestmark = pytest.mark.integration

HERE = "tests.integration.test_sampler_engine"
RUN = ("R=4", "tracking=local", "trainer.steps=2", "trainer.prompts=2", "trainer.eval_problems=4",
       "trainer.device=cpu", "rollout.max_new_tokens=8")  # fmt: skip


class WholeForward:
    """Reads the whole row again for every token: no cache, no batch. The slow, obvious way to what `eager` draws."""

    name = "whole forward"
    calls: ClassVar[list[int]] = []  # rows of each call

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def sample(
        self, prompt_ids: Sequence[Sequence[int]], seeds: Sequence[int], config: RolloutConfig,
        stop: Sequence[str] = (), greedy: bool = False, share_prompts: bool = False,
    ) -> list[Rollout]:  # fmt: skip
        self.calls.append(len(prompt_ids))
        return [self.row(ids, seed, config, stop, greedy) for ids, seed in zip(prompt_ids, seeds, strict=True)]

    @torch.no_grad()
    def row(
        self, prompt: Sequence[int], seed: int, config: RolloutConfig, stop: Sequence[str], greedy: bool
    ) -> Rollout:
        uniforms = np.random.Generator(np.random.Philox(seed)).random(config.max_new_tokens)
        drawn, logprobs, ended = list[int](), list[float](), False
        while not ended and len(drawn) < config.max_new_tokens:
            logits_V = self.policy.model(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0, -1]
            logp_V = torch.log_softmax(logits_V.float() / config.temperature, dim=-1)
            cdf_V = logp_V.double().exp().cumsum(0)
            target = uniforms[len(drawn)] * cdf_V[-1]
            token = int(logp_V.argmax()) if greedy else int(torch.searchsorted(cdf_V, target, right=True))
            drawn.append(token)
            logprobs.append(float(logp_V[token]))
            whole = self.policy.tokenizer.decode(drawn, skip_special_tokens=True)
            ended = token in self.policy.eos_ids or any(text in whole for text in stop)
        text = completion_text(self.policy.tokenizer, drawn, stop)
        return Rollout(tuple(prompt), tuple(drawn), text, np.array(logprobs, dtype=np.float32), not ended)


class NoSample:
    def __init__(self, policy: Policy) -> None: ...


class Broken:
    """Fails as `fault` says."""

    name, fault = "broken", ""

    def __init__(self, policy: Policy) -> None:
        if self.fault == "made":
            raise RuntimeError("no server")

    def sample(self, prompt_ids, seeds, config, stop=(), greedy=False, share_prompts=False):  # type: ignore[no-untyped-def]
        one = Rollout((1, 2), (3,), "x", np.zeros(1, dtype=np.float32), False)
        return {
            "few": [one],
            "other prompt": [one, Rollout((9,), (3,), "x", one.logprobs, False)],
            "long": [one, Rollout((1, 2), (3,) * 9, "x", np.zeros(9, dtype=np.float32), False)],
            "empty": [one, Rollout((1, 2), (), "", np.zeros(0, dtype=np.float32), False)],
            "no log-probabilities": [one, Rollout((1, 2), (3, 4), "x", one.logprobs, False)],
        }[self.fault]


@pytest.fixture(scope="module")
def policy(random_model_folder: Path) -> Policy:
    config = ModelConfig(name="random", path=str(random_model_folder), dtype="float64")
    return load_policy(config, torch.device("cpu"))


def test_a_run_draws_by_it_what_eager_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training and evaluation go through the chosen engine; identity and rewards are those of the built-in one."""
    monkeypatch.chdir(tmp_path)
    WholeForward.calls.clear()
    engine = f"rollout.engine={HERE}.WholeForward"
    for words in (("sweep=own", engine), ("sweep=built_in",)):
        assert main([*RUN, *words]) == 0
    found = identity(run_config(*RUN))
    assert found == identity(run_config(*RUN, engine)) == identity(run_config(*RUN, "rollout.engine=eager"))
    own, built_in = (tmp_path / "runs" / sweep / found for sweep in ("own", "built_in"))
    assert read_status(own).state == read_status(built_in).state == "finished"
    for folder, name in ((own, "whole forward"), (built_in, "eager")):
        steps = read_metrics(folder).dropna(subset=["reward"])
        assert steps[f"sampler/{name}"].tolist() == [1, 1] and (steps["sampling/tokens_per_second"] > 0).all()
    assert WholeForward.calls.count(8) == 2 and len(WholeForward.calls) > 2  # two steps of 2 x 4, and evaluations
    for a, b in zip(read_groups(own), read_groups(built_in), strict=True):
        assert (a.prompt_id, a.rewards, a.lengths, a.same_as) == (b.prompt_id, b.rewards, b.lengths, b.same_as)
        assert a.logprob_sums == pytest.approx(b.logprob_sums, abs=1e-4)


def test_a_run_that_goes_on_with_another_engine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = [*RUN, "sweep=two", "trainer.checkpoint_every=1"]
    assert main(first) == 0
    (folder,) = (tmp_path / "runs" / "two").glob("*/checkpoints")
    longer = [word.replace("steps=2", "steps=4") for word in first]
    config = run_config(*longer, f"rollout.engine={HERE}.WholeForward")
    notes = list[str]()
    train(config, folder.parent, Watch(note=notes.append))
    once = len(notes)
    again = run_config(*(word.replace("steps=4", "steps=5") for word in longer), f"rollout.engine={HERE}.WholeForward")
    train(again, folder.parent, Watch(note=notes.append))
    assert not [note for note in notes[once:] if "sampled by" in note]  # the step before was drawn by the same
    assert "rollouts are sampled by whole forward from step 2 on, and were by eager before" in notes
    steps = read_metrics(folder.parent).dropna(subset=["reward"])
    assert steps["sampler/eager"].fillna(0).tolist() == [1, 1, 0, 0, 0]
    assert steps["sampler/whole forward"].fillna(0).tolist() == [0, 0, 1, 1, 1]


def test_an_engine_of_ones_own_that_refills_is_given_more_rows_at_once(policy: Policy) -> None:
    class Refills(WholeForward):
        refills = True

    assert Checked("mine", Refills(policy)).refills and not Checked("mine", WholeForward(policy)).refills


def test_auto_is_eager_on_a_cpu_and_graph_is_refused_there(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    assert load("auto", policy).name == "eager"
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"rollout\.engine=graph: it needs a CUDA GPU, and the policy is on cpu"):
        load("graph", policy)


@pytest.mark.parametrize("reason", ["models of type x are not served", ""])
def test_auto_says_on_a_gpu_why_it_is_not_graph(
    reason: str, policy: Policy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = dataclasses.replace(policy, device=torch.device("cuda"))
    monkeypatch.setattr("grpo_sweeps.engine.samplers.why_not_served", lambda policy: reason)
    monkeypatch.setattr("grpo_sweeps.engine.samplers.graph.why_not_served", lambda policy, on_gpu: reason)
    with caplog.at_level("INFO"):
        assert load("auto", on_gpu).name == ("eager" if reason else "graph")
    assert (f"sampled by the eager engine, not by graph: {reason}" in caplog.text) is bool(reason)


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ("fast", "rollout.engine=fast: choose one of auto, eager, graph, or give the dotted path of a class"),
        ("no_such_module.Sampler", r"rollout.engine=no_such_module.Sampler: cannot be imported \(No module"),
        (f"{HERE}.Missing", "cannot be imported"),
        (f"{HERE}.NoSample", "has no method sample"),
        (f"{HERE}.HERE", "is a str; a function is needed"),
    ],
)
def test_what_is_no_engine_is_refused_before_a_model_is_loaded(engine: str, words: str) -> None:
    config = run_config(f"rollout.engine={engine}")
    with pytest.raises(ConfigError, match=words):
        check(config)
        check_functions(config)


def test_an_engine_that_cannot_be_made_is_one_sentence(monkeypatch: pytest.MonkeyPatch, policy: Policy) -> None:
    monkeypatch.setattr(Broken, "fault", "made")
    with pytest.raises(ConfigError, match=r"no sampler can be made of it \(RuntimeError: no server\)"):
        load(f"{HERE}.Broken", policy)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("few", "1 rollouts came back for 2 rows"),
        ("other prompt", "rollout 1 is of another prompt"),
        ("long", "rollout 1 has 9 tokens and 9 log-probabilities; .* from 1 to rollout.max_new_tokens=8"),
        ("empty", "rollout 1 has 0 tokens"),
        ("no log-probabilities", "2 tokens and 1 log-probabilities"),
    ],
)
def test_rollouts_that_cannot_be_are_refused_where_they_arrive(
    fault: str, words: str, monkeypatch: pytest.MonkeyPatch, policy: Policy
) -> None:
    monkeypatch.setattr(Broken, "fault", fault)
    engine = load(f"{HERE}.Broken", policy)
    assert engine.name == "broken"
    with pytest.raises(ValueError, match=words):
        engine.sample([(1, 2), (1, 2)], [0, 1], RolloutConfig(max_new_tokens=8))
