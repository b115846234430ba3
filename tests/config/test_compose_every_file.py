"""Every YAML of conf/ and sweeps/ is found, composed and converted; a new file cannot be forgotten."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import yaml

from grpo_sweeps.config import RunConfig, to_mapping
from grpo_sweeps.config.checks import check, check_functions
from grpo_sweeps.paper import MODEL_SHAPES, REWARDS, TASK
from grpo_sweeps.paths import data_root, sweep_files
from grpo_sweeps.sweep.identity import identity
from tests.composing import composed
from tests.real_models import furnish

ROOT = Path(__file__).resolve().parents[2]
# Less conf/local, which belongs to the machine and is in no checkout.
FILES = sorted(path for path in (ROOT / "conf").rglob("*.yaml") if path.relative_to(ROOT).parts[1] != "local")
CHOICES = [path.relative_to(ROOT / "conf").with_suffix("") for path in FILES if path.parent != ROOT / "conf"]
HYDRA_GROUPS = [path for path in CHOICES if path.parts[0] == "hydra"]
GROUPS = [path for path in CHOICES if path.parts[0] != "hydra"]
# A changed identity orphans the runs that users have: the file changes where that is meant, and the changelog says so.
IDENTITIES = json.loads((Path(__file__).parent / "identities.json").read_text(encoding="utf-8"))


def group_of(path: Path) -> str:
    return f"{path.parent.as_posix()}={path.name}"


def needed(choice: str) -> list[str]:
    """What a choice needs beside it: the user's own function where it leaves that open."""
    key, _, name = choice.partition("=")
    targets = {"task": "grpo_sweeps.tasks.arithmetic.arithmetic", "reward": "grpo_sweeps.rewards.exact_match.strict",
               "estimator": "grpo_sweeps.estimators.group.grpo"}  # fmt: skip
    if choice == "tracking=custom":
        return ["tracking.kind=my_module.MyTracker"]
    own = {
        "task=jsonl": [f"task.path={ROOT / 'tests' / 'data' / 'gsm8k_sample'}"], "task=hub": ["task.dataset=a/b"],
        "reward=several": [f"+reward.functions.right._target_={targets['reward']}"],
    }  # fmt: skip
    return [f"{key}._target_={targets[key]}"] if name == "custom" else own.get(choice, [])


def test_files_are_found() -> None:
    assert data_root() == ROOT
    assert len(IDENTITIES) >= 80 and {group_of(path) for path in GROUPS} & set(IDENTITIES)
    assert len(CHOICES) >= 25 and {path.parts[0] for path in GROUPS} == {
        "model", "task", "reward", "estimator", "objective", "rollout", "analysis", "trainer", "tracking",
    }  # fmt: skip


@pytest.mark.parametrize("path", GROUPS, ids=group_of)
def test_every_choice_composes_and_converts(path: Path) -> None:
    choice = group_of(path)
    config = RunConfig.from_composed(composed(choice, *needed(choice)))
    check(config)
    check_functions(config)
    assert RunConfig.from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(config)))) == config
    assert identity(config) == IDENTITIES.get(choice, identity(config))


@pytest.mark.parametrize("path", HYDRA_GROUPS, ids=group_of)
def test_hydras_own_groups_compose(path: Path) -> None:
    group, _, name = group_of(path).partition("=")
    assert composed(group_of(path)).hydra.runtime.choices[group] == name


@pytest.mark.parametrize("name", sorted(sweep_files()))
def test_every_run_of_every_sweep_composes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(furnish(tmp_path / "here"))
    master = composed(f"+sweeps={name}")
    axes = {key: str(values).split(",") for key, values in master.hydra.sweeper.params.items()}
    assert axes, "a sweep without an axis is a single run"
    seen = set()
    for values in product(*axes.values()):
        words = [f"+sweeps={name}", *(f"{key}={value}" for key, value in zip(axes, values, strict=True))]
        config = RunConfig.from_composed(composed(*words))
        assert identity(config) == IDENTITIES.get(" ".join(words), identity(config))
        check(config)
        check_functions(config)
        assert config.sweep == name.rsplit("/", 1)[-1]
        seen.add(repr(config))
    assert len(seen) == len(list(product(*axes.values())))


def test_the_published_sweeps_are_what_they_say() -> None:
    params = {
        name: yaml.safe_load(path.read_text())["hydra"]["sweeper"]["params"] for name, path in sweep_files().items()
    }
    assert str(params["default"]["R"]) == "2,4,8"
    for name in ("paper_table1", "paper_table1_tiny"):
        assert (params[name]["R"], params[name]["seed"]) == ("2,4,8", "0,1,2")


def test_the_papers_sweep_is_of_the_papers_model_task_and_reward_and_the_tiny_one_of_the_embedded_model() -> None:
    axes = sweep_files()["paper_table1"]
    words = [f"{k}={v}" for k, v in yaml.safe_load(axes.read_text())["hydra"]["sweeper"]["params"].items()]
    own = RunConfig.from_composed(composed("+sweeps=paper_table1", *(word.partition(",")[0] for word in words)))
    assert own.model.path == "nvidia/Nemotron-Mini-4B-Instruct" and own.model.name in MODEL_SHAPES
    assert not own.model.random and not own.model.lora.r and own.trainer.lr == 1e-6
    assert own.task.function.target == TASK and own.reward.target in REWARDS
    tiny = RunConfig.from_composed(composed("+sweeps=paper_table1_tiny", "R=2", "seed=0"))
    assert tiny.model.path == "embedded" and tiny.task.name == "arithmetic"


def test_launchers_are_ours() -> None:
    from hydra_plugins.grpo_launcher import config as launcher_config

    for name in ("basic", "submitit_local", "submitit_slurm"):
        launcher = composed(f"hydra/launcher={name}").hydra.launcher
        assert launcher._target_.startswith(launcher_config.HOME)
    assert composed("hydra/launcher=submitit_slurm").hydra.launcher.gpus_per_node == 1


def test_models_are_those_of_the_paper_and_more() -> None:
    paths = {path.name: composed(group_of(path)).model.path for path in GROUPS if path.parts[0] == "model"}
    assert paths["tiny"] == "embedded"
    assert paths["nemotron_mini_4b"] == "nvidia/Nemotron-Mini-4B-Instruct"
    assert paths["llama_nemotron_nano_4b"] == "nvidia/Llama-3.1-Nemotron-Nano-4B-v1.1"
    assert paths["qwen2_5_coder_0_5b"] == "Qwen/Qwen2.5-Coder-0.5B-Instruct"
    assert {"smollm2_135m", "qwen2_5_0_5b", "qwen2_5_1_5b"} <= set(paths)


@pytest.mark.parametrize("path", [path for path in GROUPS if path.parts[0] == "model"], ids=group_of)
def test_instruction_tuned_models_use_their_chat_template(path: Path) -> None:
    model = composed(group_of(path)).model
    tuned = "Instruct" in model.path or "Nemotron-Nano" in model.path
    assert model.name == path.name and model.chat_template == tuned


@pytest.mark.parametrize("path", [path for path in GROUPS if path.parts[0] == "model"], ids=group_of)
def test_pretrained_models_choose_long_rollouts_and_their_trainer(path: Path) -> None:
    found, wanted = composed(group_of(path)), composed("rollout=long", "trainer=pretrained")
    pretrained = found.rollout == wanted.rollout and found.trainer.lr == wanted.trainer.lr
    assert pretrained == (path.name != "tiny")


def test_schema_and_files_have_the_same_defaults_keys() -> None:
    """A key of the typed configuration that a group's default file leaves out still has its default."""
    config = to_mapping(RunConfig.from_composed(composed()))
    assert set(config["trainer"]) == set(composed().trainer)
    assert config["sweep"] == "adhoc"
