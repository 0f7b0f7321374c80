"""An environment for a Python that has verifiers: it asks again until the answer is long enough."""

import verifiers.v1 as vf

__all__ = ["Quiz", "QuizTasks"]


class QuizTask(vf.Task[vf.TaskData]):
    """Scored by the environment."""


class QuizTasks(vf.Taskset[QuizTask, vf.TasksetConfig]):
    """One task."""

    def load(self):
        yield QuizTask(vf.TaskData(prompt="Count."), self.config.task)


class QuizConfig(vf.EnvConfig):
    """One agent."""

    player: vf.AgentConfig = vf.AgentConfig()


class Quiz(vf.Env[QuizConfig]):
    """Says "more" until it hears "three"."""

    async def run(self, task, agents):
        async with agents.player.interaction(task) as talk:
            said = await talk.turn()
            while not said.terminated and said.last_reply != "three":
                if said.last_reply == "die":
                    raise RuntimeError("no luck")
                said = await talk.turn(f"more than {said.last_reply}")

    async def finalize(self, task, episode):
        trace = episode.traces[0]
        trace.record_reward("turns", trace.num_turns, weight=0.5)
