"""A taskset of verifiers 0.4: one turn."""

import verifiers.v1 as vf


class SumData(vf.TaskData):
    answer: str = ""


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def is_right(self, task: SumData, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == task.answer)

    @vf.metric
    async def num_digits(self, trace: vf.Trace) -> float:
        return float(sum(c.isdigit() for c in trace.last_reply or ""))


class Sums(vf.Taskset[SumTask]):
    def load(self):
        for a, b in ((2, 3), (10, 20), (7, 8), (1, 1)):
            yield SumTask(SumData(prompt=f"{a} + {b} = ?", answer=str(a + b)))


__all__ = ["Sums"]
