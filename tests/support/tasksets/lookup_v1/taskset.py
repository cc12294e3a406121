import verifiers.v1 as vf
from lookup_v1.tool import CAPITALS, Atlas


class CapitalData(vf.TaskData):
    answer: str = ""


class CapitalTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class CapitalTask(vf.Task[CapitalData, vf.State, CapitalTaskConfig]):
    @classmethod
    def toolsets(cls, config: CapitalTaskConfig) -> list[vf.Toolset]:
        return [Atlas(config.tools)]

    @vf.reward
    async def is_right(self, task: CapitalData, trace: vf.Trace) -> float:
        return float(task.answer in (trace.last_reply or ""))


class CapitalsConfig(vf.TasksetConfig):
    task: CapitalTaskConfig = CapitalTaskConfig()


class Capitals(vf.Taskset[CapitalTask, CapitalsConfig]):
    def load(self):
        for country, city in CAPITALS.items():
            data = CapitalData(prompt=f"The capital of {country}?", answer=city)
            yield CapitalTask(data, self.config.task)
