"""A taskset for a Python that has verifiers: sums, by thought, by tool, or with the user."""

import asyncio

import verifiers.v1 as vf

__all__ = ["Sums"]


class AdderState(vf.State):
    """The rollout's: how often the tool was called."""

    calls: int = 0


class AdderConfig(vf.ToolsetConfig, vf.SharedToolsetConfig):
    """No settings."""


class Adder(vf.Toolset[AdderConfig, AdderState]):
    """Tools of a rollout."""

    @vf.tool
    async def add(self, a: int, b: int) -> int:
        """Add two numbers."""
        if a == 13:
            raise ValueError("13 is not added")
        self.state.calls += 1
        return a + b


class SumData(vf.TaskData):
    """A sum."""

    answer: str


class SumTaskConfig(vf.TaskConfig):
    """How a task is solved."""

    tool: bool = False


class SumTask(vf.Task[SumData, AdderState, SumTaskConfig]):
    """Answer with the sum."""

    @classmethod
    def toolsets(cls, config):
        return [Adder(AdderConfig())] if config.tool else []

    @vf.stop
    async def third_call(self, trace: vf.Trace) -> bool:
        return trace.state.calls >= 3

    @vf.reward
    async def right(self, trace) -> float:
        if trace.last_reply == "break":
            raise RuntimeError("the scorer is broken")
        if trace.last_reply == "wait":
            await asyncio.sleep(3600)
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def by_tool(self, trace) -> float:
        texts = [message.content for message in trace.assistant_messages if message.tool_calls]
        return float(trace.state.calls) + len("".join(texts))


class SumsConfig(vf.TasksetConfig):
    """Which sums."""

    task: SumTaskConfig = SumTaskConfig()
    count: int = 4
    image: bool = False
    shared_tool: bool = False


class Sums(vf.Taskset[SumTask, SumsConfig]):
    """Task n asks for n + n."""

    @classmethod
    def toolsets(cls, config):
        return [Adder(AdderConfig())] if config.shared_tool else []

    def load(self):
        for n in range(self.config.count):
            prompt = f"{n} + {n}?"
            if self.config.image:
                part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
                prompt = [vf.UserMessage(content=[part])]
            data = SumData(prompt=prompt, system_prompt="Be brief.", answer=str(2 * n))
            yield SumTask(data, self.config.task)


if __name__ == "__main__":
    Adder.run()
