"""A card from facts.

In: :class:`CardFacts`. Out: the text of README.md: YAML front matter for the Hub, then the
sections of ``card.md.jinja`` or of a user's own template, which only arranges texts. These are the
lines of ``words.md.jinja``, and the parts of sentences and tables beyond facts: curves, hours,
certificates, and every setting by its name (flag lines in the reference trainer's names and order,
everything else as overrides of refiner). Messages of failures are left out on purpose: they contain
paths and hosts. Settings (``beta = 0.001``) are not marked as numbers: they are in ``config`` of
the evidence, by name.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import yaml
from jinja2 import Environment, StrictUndefined, Template, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from refiner_core.cards.evidence import facts_from_json, facts_to_json
from refiner_core.cards.facts import (
    MISSING,
    UNKNOWN,
    CardFacts,
    counted,
    finite,
    is_hub_id,
    number,
    public_name,
    quoted,
    unmarked,
)
from refiner_core.cards.public import read_proof
from refiner_core.cards.results import (
    ResultEntry,
    about_tasks,
    cell,
    model_index,
    own_entries,
    preferred_step,
    progression_tables,
    result_tables,
    without_value,
)
from refiner_core.contract.checks.environment import ONLY_OF_AGENTS
from refiner_core.contract.config import GrpoConfig, RecipeConfig, RewardConfig
from refiner_core.contract.errors import ConfigurationError
from refiner_core.contract.fingerprint import get_field
from refiner_core.contract.kinds import KINDS, TRAINED, TRAINED_HERE, card_words
from refiner_core.contract.marks import ABSENT, walk
from refiner_core.contract.placement import sft_section
from refiner_core.contract.planned import stage_changes
from refiner_core.contract.records import mapped
from refiner_core.report.printing import clock, spark

_UNITS = ("gpu_hours", "core_hours")
#: Replaces a line end within a line: another trainer's command may have several.
_HELD = "\x1f"


@cache
def _template() -> Template:
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    environment.filters |= {
        "amount": _amount,
        "cell": cell,
        "held": _retained,
        "public": lambda text: _retained(public_name(text)),
        "shown": shown,
    }
    environment.tests |= {
        "finite": lambda value: finite(value) is not None,
        "from_samples": lambda stage: stage in KINDS and KINDS[stage].learns_from == "sample",
        "hub_id": is_hub_id,
    }
    text = files("refiner_core.cards").joinpath("words.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(text)


def _retained(text: str) -> str:
    return text.replace("\n", _HELD)


class Sentences:
    """The sentences of one card, by list."""

    def __init__(self, facts: CardFacts) -> None:
        self._facts = facts
        unit = next((unit for unit in _UNITS if finite(facts.cost.get(unit))), None)
        self._macros = _template().make_module(
            {
                **{"facts": facts, "c": facts.config, "agent": facts.is_agent},
                **{"fact": facts.fact, "n": facts.number, "counted": facts.counted},
                **{"number": number, "as_counted": counted, "quoted": quoted},
                **{"done": self._done, "times": self._times, "later_attempt": self._later_attempt},
                **{"enumerate": enumerate, "trained_here": TRAINED_HERE, "how": _how(facts)},
                **{"rubrics": rubric_source(facts.config.reward), "unit": unit},
                **{"proof": read_proof(facts.proof), "stage_changes": stage_changes},
                **{"own_entries": own_entries(facts), "missing": without_value(facts)},
                **{"later_fields": list(_later_fields(facts)), "moving": _moving_names(facts)},
                **{"section": self._section, "trains": self._trains},
                "only_its_judge": self._only_its_judge(),
            }
        )

    def text(self, name: str, *words: Any) -> str:
        """The text of a macro."""
        return str(getattr(self._macros, name)(*words)).strip().replace(_HELD, "\n")

    def lines(self, name: str, *words: Any) -> list[str]:
        """The lines of a macro, without blank ones."""
        said = str(getattr(self._macros, name)(*words)).split("\n")
        return [line.replace(_HELD, "\n") for line in said if line]

    def protocol(self, fingerprint: str, entries: Sequence[ResultEntry] = ()) -> str:
        """A protocol in words, with the meaning of its numbers; empty if it was not recorded."""
        known = self._facts.protocols.get(fingerprint)
        return self.text("protocol", known, entries, about_tasks(entries)) if known else ""

    def earlier(self) -> list[dict[str, Any]]:
        """The stages of the same run that precede this one, the last first: a sentence and lines
        for each."""
        stage, reports = self._facts.stage, self._facts.reports
        before = TRAINED_HERE[: TRAINED_HERE.index(stage)] if stage in TRAINED_HERE else ()
        found: list[dict[str, Any]] = []
        for name in reversed([s for s in before if s in reports]):
            lines = self.lines("fine_tuned", name)
            lines = [line for line in lines if not line.startswith(("**Loss", "**Seed"))]
            who = "That one" if found else "Training"
            said = f"{who} started from the {name.upper()} stage of the same run:"
            found.append({"sentence": said, "lines": lines})
        return found

    def _trains(self, judge: Mapping[str, Any]) -> bool:
        """True if a protocol's judge also gave the rewards that the model was trained on. Word
        overlap is a stand-in, and says nothing anyway."""
        own = self._facts.config.judge
        rewarded = self._facts.stage == "grpo" and not self._facts.is_agent
        asked = judge.get("kind"), judge.get("model"), judge.get("revision")
        return rewarded and own.kind == "openai" and asked == (own.kind, own.model, own.revision)

    def _only_its_judge(self) -> bool:
        used = {str(entry.values.get("protocol")) for entry in own_entries(self._facts)}
        known = [self._facts.protocols[name] for name in used if name in self._facts.protocols]
        judges = [protocol.get("judge") or {} for protocol in known]
        return bool(judges) and all(map(self._trains, judges))

    def _done(self, path: str, words: tuple[tuple[str, ...], ...], least: int = 0) -> list[str]:
        """Counts of a report; missing ones, and those below ``least``, are left out."""
        report = self._facts.fact(path) or {}
        return [
            counted(report[key], f"{path}.{key}", *said)
            for key, *said in words
            if report.get(key) is not None and report[key] >= least
        ]

    def _times(self, path: str) -> list[tuple[str, str]]:
        """Stages with their durations, in the order of work."""
        seconds = self._facts.fact(path) or {}
        known = [stage for stage in seconds if finite(seconds[stage]) is not None]
        place = {name: kind.order for name, kind in KINDS.items()}
        known.sort(key=lambda stage: (place.get(stage, sys.maxsize), stage))
        return [(stage, clock(seconds[stage])) for stage in known]

    def _later_attempt(self, place: int) -> int | None:
        """Index of the next attempt at the same stage."""
        attempts = self._facts.attempts
        later = range(place + 1, len(attempts))
        return next((i for i in later if attempts[i].stage == attempts[place].stage), None)

    def _section(self, stage: str) -> Any:
        config = self._facts.config
        return config.grpo if stage == "grpo" else sft_section(config, stage)


def rubric_source(reward: RewardConfig) -> str:
    """The rubric source in effect."""
    if not reward.instance_rubrics_only:
        return reward.rubric_source
    return "instance" if "instance" in reward.rubric_source else "none"


def _how(facts: CardFacts) -> str:
    """The stages that made the model, in words."""
    cards = {name: card_words(name) for name in TRAINED}
    words = {n: c.made_by_agents if facts.is_agent else c.made for n, c in cards.items() if c.made}
    if facts.stage not in words:
        return f"trained by the stage `{facts.stage}`"
    made = [stage for stage in words if stage in facts.reports or stage == facts.stage]
    return ", then ".join(words[stage] for stage in made[: made.index(facts.stage) + 1])


def _later_fields(facts: CardFacts) -> Iterator[tuple[str, str, Any]]:
    """Options added after the run: name, meaning, and effective value then. Checks that only warn,
    the former default, changed nothing."""
    if facts.recorded_fields is None:
        return
    idle = card_words(facts.stage).silent
    if not facts.is_agent:
        idle = (*idle, *ONLY_OF_AGENTS)
    for path, info in walk(RecipeConfig):
        known = info.legacy_value is ABSENT or path in facts.recorded_fields
        plain = ".health." not in path and not path.startswith(_PENALTIES)
        if plain and not known and not path.startswith(idle):
            yield flag_of(path) or path, info.doc, info.legacy_value


def _moving_names(facts: CardFacts) -> list[str]:
    """Hub repositories that were read at a branch, which may have changed since."""
    config = facts.config
    asked = facts.stage == "grpo" and not facts.is_agent
    based = is_hub_id(facts.base) and facts.base_model in (None, UNKNOWN)
    moving = {
        "the base model": based and config.model.revision,
        "the prompts": asked and is_hub_id(config.data.rl_path) and config.data.rl_revision,
        "the judge": asked and config.judge.kind == "openai" and config.judge.revision,
    }
    return [what for what, revision in moving.items() if revision == "main"]


def _amount(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.2g}"


# ---------------------------------------------------------------- curves

TABLE_POINTS = 10
SPARK_POINTS = 40
#: Curves of a stage's report (dotted path in it), with their names in a card. The first is drawn.
_CURVES: dict[str, tuple[tuple[str, str], ...]] = {
    "grpo": (
        ("curves.scores", "reward"),
        ("curves.objective/kl3_avg", "KL"),
        ("curves.val/sequence_lengths", "tokens per rollout"),
        ("curves.val/stop_rate", "share that stopped"),
        ("monitor.proxy", "the training reward of monitored prompts, as a share of its range,"),
        ("monitor.gold", "the gold reward of monitored prompts, as a share of its range,"),
    ),
    "sft": (("train_loss.curve", "training loss"),),
}
#: The same for an agent, whose rollouts also contain words of tools and users.
_CURVES_OF_EPISODES = (
    ("curves.scores", "reward"),
    ("curves.objective/kl3_avg", "KL"),
    ("curves.episodes/success", "share solved"),
    ("curves.episodes/turns", "turns"),
    ("curves.val/sequence_lengths", "tokens per episode, with those of tools and user"),
)


class _Curve(NamedTuple):
    """One curve: its fact, its name in a card, its steps and values."""

    fact: str
    name: str
    steps: Sequence[Any]
    values: Sequence[float | None]

    def step(self, index: int) -> str:
        return number(self.steps[index], f"{self.fact}.{index}.0")

    def value(self, index: int) -> str:
        value = self.values[index]
        return MISSING if value is None else number(f"{value:.4g}", f"{self.fact}.{index}.1")


def training_curve(facts: CardFacts) -> dict[str, Any] | None:
    """This model's training curves as a table (``header``, ``rows``), a sparkline and notes
    (``lines``); None if no point is recorded."""
    names = _CURVES.get(facts.stage, _CURVES["sft"])
    if facts.stage == "grpo" and facts.is_agent:
        names = _CURVES_OF_EPISODES
    found = []
    for path, name in names:
        fact = f"reports.{facts.stage}.{path}"
        points = facts.fact(fact)
        if points and isinstance(points, list | tuple):
            values = [finite(point[1]) for point in points]
            found.append(_Curve(fact, name, [point[0] for point in points], values))
    if not found:
        return None
    main, *others = found
    beside = [main, *(curve for curve in others if curve.steps == main.steps)]
    return {
        "header": ["step", *(curve.name for curve in beside)],
        "rows": [
            [main.step(i), *(curve.value(i) for curve in beside)]
            for i in _spread(len(main.steps), TABLE_POINTS)
        ],
        "lines": [
            _sparkline(main),
            *(
                f"{curve.name[:1].upper()}{curve.name[1:]} was not computed in all steps; the "
                f"first value is {curve.value(0)}, the last {curve.value(len(curve.steps) - 1)}."
                for curve in others
                if curve not in beside
            ),
            *_validation(facts),
        ],
    }


def _spread(length: int, most: int) -> list[int]:
    """At most ``most`` indices, evenly spread, with the first and the last."""
    if length <= most:
        return list(range(length))
    return [round(i * (length - 1) / (most - 1)) for i in range(most)]


def _sparkline(curve: _Curve) -> str:
    known = [(value, index) for index, value in enumerate(curve.values) if value is not None]
    if not known:
        return f"The {curve.name} was never a finite number."
    (low, first), (high, last) = min(known), max(known)
    shown = [curve.values[i] for i in _spread(len(curve.values), SPARK_POINTS)]
    blocks = spark(shown, low, high)
    return (
        f"{curve.name.capitalize()} from step {curve.step(0)} to "
        f"{curve.step(len(curve.steps) - 1)}: `{blocks}` (lowest {curve.value(first)}, highest "
        f"{curve.value(last)})."
    )


def _validation(facts: CardFacts) -> Iterator[str]:
    path = f"reports.{facts.stage}.validation_loss"
    facts_of = {key: f"{path}.{key}" for key in ("final", "best", "best_step")}
    known = {key: finite(facts.fact(fact)) for key, fact in facts_of.items()}
    if None not in known.values():
        final, best, step = (number(f"{known[k]:.4g}", fact) for k, fact in facts_of.items())
        yield f"Validation loss: {final} at the end, lowest {best} after step {step}."


# ---------------------------------------------------------------- settings

#: The seed cards' flags, line by line. The rest of ``grpo`` follows in the order of the fields.
_FLAG_LINES: tuple[tuple[str, ...], ...] = (
    ("reward.verification_reward",),
    ("reward.non_stop_penalty",),
    ("reward.gate_judge_score_with_format_bonus",),
    ("reward.apply_paper_citation_reward",),
    ("reward.paper_citation_weight",),
    ("reward.instance_rubrics_only",),
    ("grpo.kl_estimator", "grpo.beta"),
    ("grpo.num_unique_prompts_rollout", "grpo.num_samples_per_prompt_rollout"),
    ("grpo.learning_rate", "grpo.lr_scheduler_type"),
    ("data.max_prompt_token_length", "grpo.response_length"),
    ("grpo.max_token_length", "grpo.pack_length"),
    ("grpo.temperature", "seed"),
    ("grpo.per_device_train_batch_size", "grpo.deepspeed_stage"),
)
#: Reward fields without the ``refiner_reward_`` prefix in the reference trainer.
_PLAIN = ("verification_reward", "non_stop_penalty", "non_stop_penalty_value")
#: Reward fields without a flag in the reference trainer.
_OURS = ("combination", "rubric_source", "static_rubrics", "rubric_aggregation")
#: Without meaning for an agent: its environment rewards it, its template ends turns.
_NOT_OF_AGENTS = ("reward.", "grpo.stop_strings")


def shown(value: Any) -> str:
    """A value as written on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ",".join(map(shown, value)) or "[]"
    if isinstance(value, float):
        mantissa, e, exponent = repr(value).partition("e")
        return f"{mantissa}e{int(exponent)}" if e else mantissa
    return "null" if value is None else str(value)


def flag_of(path: str) -> str | None:
    """The reference trainer's flag for a field; None if there is none."""
    section, _, name = path.rpartition(".")
    if section == "reward":
        if name in _OURS:
            return None
        return f"--{name}" if name in _PLAIN else f"--refiner_reward_{name}"
    if section == "grpo" or path in ("seed", "data.max_prompt_token_length"):
        return f"--{name}"
    return None


def grpo_flags(facts: CardFacts) -> list[str]:
    """Flag lines of a GRPO run: the seed cards' lines first, then every other identity setting."""

    def flag(path: str) -> str:
        return f"{flag_of(path)} {shown(get_field(facts.config, path))}"

    def known(path: str) -> bool:
        value = get_field(facts.config, path)
        recorded = _is_told(facts, path)
        meant = not facts.config.environment.name or not path.startswith(_NOT_OF_AGENTS)
        return recorded and meant and value is not None

    lines = [[path for path in line if known(path)] for line in _FLAG_LINES]
    used = {path for line in _FLAG_LINES for path in line}
    rest = [f"reward.{path}" for path, info in walk(RewardConfig) if info.mark == "identity"]
    rest += [f"grpo.{path}" for path, info in walk(GrpoConfig) if info.mark == "identity"]
    lines += [[path] for path in rest if path not in used and flag_of(path) and known(path)]
    return [" ".join(map(flag, line)) for line in lines if line]


#: Fields that a card names only if they differ from what all runs before them had, so that a card
#: of an earlier run stays the same when it is made again.
_PENALTIES = "reward.penalties."
_ONLY_IF_CHANGED = ("sft.adam_beta2", "rft.adam_beta2", "grpo.adam_beta2")


def _is_told(facts: CardFacts, path: str) -> bool:
    """True if a card names a setting: the run knew it, and it says something."""
    if path in _ONLY_IF_CHANGED or path.startswith(_PENALTIES):
        before = dict(walk(RecipeConfig))[path].legacy_value
        if get_field(facts.config, path) == before:
            return False
    return facts.recorded_fields is None or path in facts.recorded_fields


def own_settings(facts: CardFacts, sections: tuple[str, ...]) -> list[str]:
    """Identity settings without a reference flag, as overrides ``section.field=value``."""
    lines = []
    for path, info in walk(RecipeConfig):
        section, _, name = path.partition(".")
        checks = name.startswith("health.") and section in (facts.stage, *sections)
        if info.mark != "identity" or (section not in sections and not checks):
            continue
        if checks and get_field(facts.config, path) == info.legacy_value:
            continue  # the same as in every run
        if not _is_told(facts, path):
            continue
        if facts.stage == "grpo" and flag_of(path):
            continue
        value = get_field(facts.config, path)
        if path.startswith("command.") and value in ("", ()):
            continue
        if value is not None:
            lines.append(f"{path}={shown(value)}")
    return lines


_FIX = "correct the template (`refiner card template` prints the shipped one, to start from)"


def shipped_template() -> str:
    """The template (Jinja) of cards, to copy and change; a recipe sets another one
    by ``publish.card_template=FILE``.

    Raises
    ------
    OSError
        It cannot be read: the installation is damaged.
    """
    return files("refiner_core.cards").joinpath("card.md.jinja").read_text(encoding="utf-8")


def check_template(text: str) -> None:
    """Check, before there is anything to publish, whether a template parses.

    Raises
    ------
    ConfigurationError
        It does not parse; the message names the line.
    """
    try:
        _compiled(text)
    except TemplateSyntaxError as e:
        raise _unfit(e, "a template that Jinja can parse") from e


def render(template: str | None, variables: Mapping[str, Any]) -> str:
    """The card's text; ends with one line feed.

    Raises
    ------
    ConfigurationError
        A user's template does not parse, or uses unknown variables; the message names the line.
    """
    text = shipped_template() if template is None else template
    try:
        return _compiled(text).render(variables).rstrip() + "\n"
    except (
        TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as e:
        if template is None:
            raise
        names = ", ".join(sorted(variables))
        raise _unfit(e, f"Jinja that uses these variables: {names}") from e


@lru_cache(maxsize=8)
def _compiled(text: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    return environment.from_string(text)


def _unfit(error: BaseException, expected: str) -> ConfigurationError:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == "<template>"]
    line = frames[-1].lineno if frames else None
    if isinstance(error, TemplateSyntaxError):
        line = error.lineno
    return ConfigurationError(
        f"The card template fails at line {line or '?'}: {error}.", expected=expected, fix=_FIX
    )


_ANSWER_ONLY = "answer_only"
_EVIDENCE = """\
<query>When was the bridge opened?</query>
<tool_output>
<snippet id=S_a1B9xQ2>The bridge was opened in 1932.</snippet>
</tool_output>"""
_ANSWER = "<answer><snippet id=S_a1B9xQ2>The bridge has been open since 1932.</snippet></answer>"
_TURN = '<tool_call>{"name": "respond", "arguments": {"content": "May I have the id?"}}</tool_call>'


def output_format(facts: CardFacts) -> dict[str, Any]:
    """Output format of the model: modes of its training rows, and an example; for an agent, a
    turn."""
    modes = () if facts.is_agent else _modes(facts)
    alone = modes in ((), (_ANSWER_ONLY,))
    answer = _ANSWER if alone else f"The first snippet answers the question.\n{_ANSWER}"
    return {
        "modes": modes,
        "answer_only": alone and not facts.is_agent,
        "evidence": "" if facts.is_agent else _EVIDENCE,
        "answer": _TURN if facts.is_agent else answer,
    }


def _modes(facts: CardFacts) -> tuple[str, ...]:
    """Modes of the kept rows; empty if not counted."""
    if facts.config.data.refiner_mode is not None:
        return (facts.config.data.refiner_mode,)
    which = "rl" if facts.on_prompts else "sft"
    counts = facts.fact(f"reports.data.{which}.modes") or {}
    return tuple(sorted(mode for mode, count in counts.items() if count))


_BUILTIN = "builtin:"
_NOTHING = "Nothing was recorded of the code behind this checkpoint."


def build_card(facts: CardFacts) -> str:
    """The README.md of a published checkpoint; the same facts give the same bytes.

    Raises
    ------
    ConfigurationError
        The user's template is invalid; see :func:`refiner_core.cards.build.render`.
    """
    known = facts_to_json(facts)
    variables = card_variables(facts_from_json(known)) | {"facts": known}
    # Templates may inspect texts: these have no marks.
    plain = mapped(variables, lambda one: unmarked(one) if isinstance(one, str) else one)
    return render(facts.template, plain)


def marked_card(facts: CardFacts, template: str | None = None) -> str:
    """The card with its numbers marked (:func:`refiner_core.cards.facts.numbers_in`). Same errors
    as :func:`build_card`."""
    known = facts_to_json(facts)
    return render(template, card_variables(facts_from_json(known)) | {"facts": known})


def card_variables(facts: CardFacts) -> dict[str, Any]:
    """Variables of a template; the head of ``card.md.jinja`` describes each of them."""
    grpo, words = facts.stage == "grpo", Sentences(facts)
    earlier, shape = words.earlier(), output_format(facts)
    return {
        "front_matter": yaml.safe_dump(
            front_matter(facts), sort_keys=False, allow_unicode=True, width=1000
        ),
        "name": facts.name,
        "repo_id": facts.repo_id,
        "short_name": card_words(facts.stage).short,
        "step": facts.step,
        "steps": facts.config.grpo.num_training_steps if grpo else None,
        "final": facts.final,
        "external": facts.stage == "command",
        "description": facts.description,
        "summary": words.text("summary"),
        "agent": facts.is_agent,
        "task": words.text("task"),
        "base_model": words.text("base_model"),
        "algorithm": card_words(facts.stage).algorithm,
        "setup": words.lines("setup"),
        "before": [line for stage in earlier for line in stage["lines"]],
        "earlier": earlier,
        "cost": words.lines("cost"),
        "format": shape,
        "usage": words.text("usage", shape),
        "tables": result_tables(facts, words.protocol),
        "progression": progression_tables(facts),
        "preferred": preferred_step(facts),
        "curve": training_curve(facts),
        "command": facts.command,
        "reproduction": words.lines("reproduction"),
        "flags": grpo_flags(facts) if grpo else [],
        "settings": own_settings(facts, _sections(facts)),
        "notes": words.lines("notes"),
        "provenance": words.lines("provenance") or [_NOTHING],
    }


def _sections(facts: CardFacts) -> tuple[str, ...]:
    """Sections of the configuration that shaped this model."""
    sections = card_words(facts.stage).sections
    if facts.is_agent:
        judged = facts.config.environment.nl_assertions == "judge"
        sections = tuple(s for s in sections if judged or s not in ("reward", "judge"))
        sections = (*sections, "environment", *(["grpo"] if facts.stage == "grpo" else []))
    if not facts.on_prompts:
        return sections
    made = [k.name for k in KINDS.values() if k.trains == "demonstrations" or k.name == "sample"]
    before = [s for s in made if s in facts.reports and s not in sections and facts.stage != s]
    return (*sections, *before)


def front_matter(facts: CardFacts) -> dict[str, Any]:
    """The card's metadata, in the usual order."""
    data = facts.config.data
    sets = card_words(facts.stage).data_sets
    used = [(getattr(data, f"{s}_path"), getattr(data, f"{s}_revision")) for s in sets]
    datasets = list(dict.fromkeys(path for path, rev in used if rev and is_hub_id(path)))
    subject = ["tool-use", "agents"] if facts.is_agent else ["citations"]
    tags = [*card_words(facts.stage).tags, "refiner", *subject]
    if "qwen3" in facts.base.lower():
        tags.append("qwen3")
    matter: dict[str, Any] = {
        "license": facts.license,
        "base_model": facts.base.replace(_BUILTIN, "builtin-"),
        "base_model_relation": "finetune",
        "pipeline_tag": "text-generation",
        "library_name": "transformers",
        "tags": tags,
    }
    if facts.base == UNKNOWN:
        del matter["base_model"], matter["base_model_relation"]
    if datasets:
        matter["datasets"] = datasets
    index = model_index(facts)
    if index:
        matter["model-index"] = index
    return matter
