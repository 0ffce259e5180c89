"""Settings to rescore under, from the words of a person.

In: ``--judge``, ``--rubrics``, ``--citation-weight``, ``KEY=VALUE``, and the configuration that
they change. Out: :class:`Setting` values, each with a name for people. Every option is a setting of
its own, or with ``cross`` every combination of them; ``KEY=VALUE`` apply to all, and are a setting
of their own where there is no other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

from infra.host.secrets import mask_keys_of
from refiner_core.contract.checks.recipe import check_config
from refiner_core.contract.config import JudgeConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.loading import apply_overrides, parse_config
from refiner_core.contract.marks import walk
from refiner_core.contract.recipes.recipe_files import settled
from refiner_core.contract.yaml_words import yaml_reason
from refiner_core.rubrics import load_rubric_set

OWN = "own"
AGAIN = "own, again"
_PAIRS = re.compile(r",(?=\s*[a-z_]+(?:\.[a-z_]+)*=)")
_EXECUTION = frozenset(path for path, info in walk(JudgeConfig) if info.mark == "execution")


@dataclass(frozen=True)
class Setting:
    """Rewards and a judge under a name."""

    name: str
    config: RecipeConfig

    @property
    def reward(self) -> RewardConfig:
        """Of what a score is made."""
        return self.config.reward

    @property
    def judge(self) -> JudgeConfig:
        """Who gives it."""
        return self.config.judge


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    judges: tuple[str, ...] = ()
    rubrics: tuple[str, ...] = ()
    citation_weights: tuple[float, ...] = ()
    overrides: tuple[str, ...] = ()
    cross: bool = False


def own_setting(config: RecipeConfig, overrides: Sequence[str] = (), name: str = OWN) -> Setting:
    """A run's own settings; of the overrides only those that say where or how its judge is asked
    have a part in them."""
    where = [o for o in overrides if o.partition("=")[0].removeprefix("judge.") in _EXECUTION]
    return Setting(name, apply_overrides(config, where))


def make_settings(base: RecipeConfig, options: Options) -> list[Setting]:
    """The settings that the options ask for, over ``base``.

    Raises
    ------
    ConfigurationError
        A judge, a rubric set, a weight or a key cannot be meant.
    """
    for override in options.overrides:
        if not override.startswith(("reward.", "judge.")):
            raise ConfigurationError(
                f"`refiner rescore` does not know {override!r}.",
                expected="runs, workspace=DIR, and fields of `reward` and `judge` as KEY=VALUE",
                fix="leave it out, or correct it",
            )
    factors: list[list[tuple[str, Any]]] = [
        [("judge", spec) for spec in options.judges],
        [("rubrics", name) for name in options.rubrics],
        [("citation_weight", weight) for weight in options.citation_weights],
    ]
    changes = [(change,) for factor in factors for change in factor]
    if options.cross and changes:
        changes = list(product(*(factor for factor in factors if factor)))  # type: ignore[arg-type]
    changed = [o for o in options.overrides if o.partition("=")[0] not in _where()]
    if not changes and changed:
        return [_setting(base, (), options.overrides)]
    settings = [_setting(base, change, options.overrides) for change in changes]
    return _told_apart(settings)


def _where() -> frozenset[str]:
    return frozenset(f"judge.{path}" for path in _EXECUTION)


def _setting(
    base: RecipeConfig, change: Sequence[tuple[str, Any]], overrides: Sequence[str]
) -> Setting:
    config, names = base, []
    for kind, value in change:
        if kind == "judge":
            name, judge = judge_of(str(value), config)
            config = replace(config, judge=judge)
        elif kind == "rubrics":
            name, config = str(value), replace(config, reward=rubrics_of(str(value), config.reward))
        else:
            name, reward = f"{value:g}", config.reward
            config = replace(
                config,
                reward=replace(
                    reward, paper_citation_weight=value, apply_paper_citation_reward=True
                ),
            )
        is_file = kind == "rubrics" and name.endswith((".yaml", ".yml"))
        names.append(f"{kind}={Path(name).stem if is_file else name}")
    names += [o for o in overrides if o.partition("=")[0] not in _where()]
    config = check_config(apply_overrides(config, list(overrides)))
    mask_keys_of(config)
    if "static" in config.reward.rubric_source and not config.reward.instance_rubrics_only:
        load_rubric_set(config.reward.static_rubrics)
    return Setting(", ".join(names), config)


def _told_apart(settings: Sequence[Setting]) -> list[Setting]:
    """No two of one name."""
    seen: dict[str, int] = {}
    apart = []
    for setting in settings:
        seen[setting.name] = number = seen.get(setting.name, 0) + 1
        apart.append(setting if number == 1 else replace(setting, name=f"{setting.name} #{number}"))
    return apart


def rubrics_of(name: str, reward: RewardConfig) -> RewardConfig:
    """The reward with another rubric set, or with ``instance`` or ``none``.

    A run that had instance rubrics keeps them beside the set; ``static:SET`` uses the set alone,
    ``instance+SET`` both.
    """
    if name in ("instance", "none"):
        source: Any = name
        return replace(reward, rubric_source=source, instance_rubrics_only=False)
    source = "static" if reward.rubric_source in ("static", "none") else "instance+static"
    for prefix, meant in (("static:", "static"), ("instance+", "instance+static")):
        if name.startswith(prefix):
            name, source = name.removeprefix(prefix), meant
    load_rubric_set(name)
    return replace(reward, static_rubrics=name, rubric_source=source, instance_rubrics_only=False)


def judge_of(spec: str, base: RecipeConfig) -> tuple[str, JudgeConfig]:
    """A judge by ``lexical``, a YAML file, or ``key=value`` pairs over the run's own judge; and its
    name.

    Raises
    ------
    ConfigurationError
        It is none of these.
    """
    if spec == "lexical":
        return "lexical", replace(JudgeConfig(), max_failed_share=base.judge.max_failed_share)
    path = Path(spec).expanduser()
    if path.suffix in (".yaml", ".yml") or path.is_file():
        return path.stem, _from_file(path)
    pairs = [pair.strip() for pair in _PAIRS.split(spec)]
    if not all("=" in pair for pair in pairs):
        raise ConfigurationError(
            f"--judge {spec} is not understood.",
            expected="`lexical`, a YAML file with a section `judge`, or pairs such as "
            "model=NAME,base_url=http://127.0.0.1:8000/v1",
            fix="write it in one of these ways",
        )
    given = dict(pair.removeprefix("judge.").split("=", 1) for pair in pairs)
    if "kind" not in given and ({"model", "base_url"} & given.keys()):
        given = {"kind": "openai", **given}
    start = base
    if given.get("kind", base.judge.kind) != base.judge.kind:
        start = replace(base, judge=JudgeConfig())
    elif given.get("model", base.judge.model) != base.judge.model:
        start = replace(base, judge=replace(base.judge, revision=None))
    judge = apply_overrides(start, [f"judge.{k}={v}" for k, v in given.items()]).judge
    return _judge_name(given), judge


def _judge_name(given: Mapping[str, str]) -> str:
    """The model, and whatever else is no matter of where or how it is asked."""
    rest = [f"{k}={v}" for k, v in given.items() if k not in {*_EXECUTION, "kind", "model"}]
    model = [given["model"].rpartition("/")[2]] if "model" in given else []
    return ",".join(model + rest) or given.get("kind", "own")


def _from_file(path: Path) -> JudgeConfig:
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(
            f"The judge {path} cannot be read: {yaml_reason(error, path)}",
            expected="a YAML file with a section `judge`",
            fix="correct the path or the file",
        ) from error
    if not isinstance(values, Mapping):
        raise ConfigurationError(
            f"The judge {path} holds no fields.",
            expected="a section `judge`, e.g. `judge: {kind: openai, model: NAME, base_url: URL}`",
            fix="write one",
        )
    from omegaconf import OmegaConf

    node = settled(OmegaConf.create({"judge": values.get("judge", values)}), path.parent)
    plain = cast(dict[str, Any], OmegaConf.to_container(node))
    return parse_config(plain, origin=path.name).judge
