"""A taskset of verifiers 0.4 with an environment of its own, whose code is the user."""

import verifiers.v1 as vf


class GuessData(vf.TaskData):
    answer: str = ""


class GuessTask(vf.Task[GuessData]):
    @vf.reward
    async def is_found(self, task: GuessData, trace: vf.Trace) -> float:
        return float((trace.last_reply or "").strip() == task.answer)


class Guesses(vf.Taskset[GuessTask]):
    def load(self):
        for number in (3, 6):
            yield GuessTask(GuessData(prompt="A number from 1 to 8?", answer=str(number)))


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            for _ in range(3):
                reply = (interaction.trace.last_reply or "").strip()
                if reply == task.data.answer or interaction.trace.stop_condition:
                    break
                is_low = reply.isdigit() and int(reply) < int(task.data.answer)
                await interaction.turn("higher" if is_low else "lower")


__all__ = ["GuessEnv", "Guesses"]
