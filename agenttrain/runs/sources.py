"""Sources of a step's rollouts with their evaluations: recorded, or sampled by this process."""

from __future__ import annotations

from agenttrain.data.curriculum import Curriculum
from agenttrain.data.mixture import Mixture
from agenttrain.data.tasks import TaskSource
from agenttrain.evaluation import LossEvaluator, TaskEvaluator
from agenttrain.rollout.collector import Collector
from agenttrain.rollout.sharing import Costs, Peers
from agenttrain.rollout.source import Demonstrations, RolloutSource
from agenttrain.runs.setup import Components
from agenttrain.settings.run_config import RunConfig
from agenttrain.training.policy import Policy
from agenttrain.training.world import World


def make_recorded_source(
    config: RunConfig, components: Components, policy: Policy, world: World
) -> tuple[Demonstrations, LossEvaluator]:
    """Return the source of batches of demonstrations, and the evaluator of the held-out ones."""
    tasks = components.tasks.train
    assert isinstance(tasks, TaskSource), "a mixture has no demonstrations"
    # A conversation longer than either limit is left out.
    context = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    limits = [limit for limit in (config.sft.max_tokens, context) if limit is not None]
    source = Demonstrations(
        demonstrator=components.demonstrator,
        tasks=tasks,
        batch_size=config.sft.batch_size,
        on_bad_row=config.data.on_bad_row,
        max_tokens=min(limits, default=2**31),  # more than any conversation has
        peers=world,
    )
    evaluator = LossEvaluator(
        config=config, source=source, tasks=components.tasks.test, policy=policy, world=world
    )
    return source, evaluator


def make_sampled_source(
    config: RunConfig, components: Components, collector: Collector, world: World
) -> tuple[RolloutSource, TaskEvaluator]:
    """Return the source of sampled rollouts, and the evaluator on held-out tasks."""
    source = make_rollout_source(config, components, collector, world)
    evaluator = TaskEvaluator(
        config=config, source=source, tasks=components.tasks.test, world=world
    )
    return source, evaluator


def make_rollout_source(
    config: RunConfig, components: Components, collector: Collector, peers: Peers
) -> RolloutSource:
    """Return the source that draws the tasks of each step and samples their groups.

    `peers` are the processes that share a step's groups.
    """
    tasks, settings = components.tasks.train, config.data.curriculum
    # It learns from each step's results which tasks come next.
    curriculum: Curriculum | Mixture | None = None
    if isinstance(tasks, Mixture):
        # `tasks` are in the order without curricula. This mixture has those of its sources, and the
        # cursor of this source of rollouts alone.
        curriculum = components.mixture()
    elif settings.enabled:
        curriculum = Curriculum(tasks, settings, seed=config.seed)
    return RolloutSource(
        algorithm=config.algorithm,
        tasks_per_step=config.tasks_per_step,
        seed=config.seed,
        collector=collector,
        tasks=tasks,
        curriculum=curriculum,
        peers=peers,
        # The column that breaks evaluations down also tells kinds of tasks of different cost.
        costs=Costs(config.eval.group_by),
    )
