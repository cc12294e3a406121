"""Mistakes that mypy --strict and pyright must flag, one on every line with the comment "flagged";
nothing is run."""

from __future__ import annotations

import verifiers as vf

ROWS = [{"question": "2 + 2", "answer": "4"}]
env = vf.SingleTurnEnv(dataset=ROWS)

# --- names
vf.SingelTurnEnv  # flagged
vf.RLTrainr  # flagged
from verifiers import load_enviroment  # flagged  # noqa: E402, F401

# --- constructors
vf.SingleTurnEnv(dataset=ROWS, sytem_prompt="Add.")  # flagged
vf.SingleTurnEnv(dataset=ROWS, system_prompt=4)  # flagged
vf.MultiTurnEnv(dataset=ROWS, max_turn=4)  # flagged
vf.ToolEnv(tools=[len], dataset=ROWS, max_turns="ten")  # flagged
vf.PythonEnv(dataset=ROWS, memory_bg=2)  # flagged
vf.EnvGroup([env], env_names="one", system_prompt="x")  # flagged
vf.EnvGroup(["reverse-text"])  # flagged
vf.Rubric(funcs=[len], wieghts=[1.0])  # flagged
vf.Rubric(funcs=len)  # flagged
vf.JudgeRubric(judge_modell="m")  # flagged
vf.XMLParser(["answer"], answer_feild="answer")  # flagged
vf.OpenAIChatCompletionsClient(base_ulr="http://127.0.0.1:8000/v1")  # flagged
vf.ClientConfig(timeout="long")  # flagged
vf.ThinkParser(3)  # flagged

# --- running
env.evaluate("local", num_example=3)  # flagged
env.evaluate("local", temprature=0.5)  # flagged
env.evaluate("local", max_concurrent="all")  # flagged
env.evaluate(5, "my-model")  # flagged
env.generate(ROWS, "local", n_sample=3)  # flagged
env.evaluate_sync("local", resume="yes")  # flagged
vf.load_environment(3)  # flagged
env.evalute("local")  # flagged

# --- an author's code


class Wrong(vf.MultiTurnEnv):
    def env_response(self, messages: vf.Messages) -> vf.Messages:  # flagged
        return {"role": "user", "content": "again"}  # flagged

    @vf.stop(prioritty=3)  # flagged
    def enough(self, state: vf.State) -> bool:
        return bool(state["trajectory"])

    @vf.stop
    def done(self, state: vf.State) -> bool:
        return "yes"  # flagged


def half(completion: vf.Messages) -> float:
    return completion.content  # flagged


# --- results
results = env.evaluate_sync("local")
results.rewrads  # flagged
total: str = results.rewards[0]  # flagged
results.metadata.avg_reward.upper()  # flagged
vf.ToolCall("c1", "add").arguments["a"]  # flagged

# --- tests
vf.testing.ScriptedCleint(["4"])  # flagged
vf.testing.ScriptedClient(["4"], tokns=True)  # flagged

# --- training
vf.RLConfig(lerning_rate=1e-5)  # flagged
vf.RLConfig(batch_size="large")  # flagged
vf.RLConfig(weight_decay="none")  # flagged
vf.RLTrainer("builtin:tiny", "reverse-text", {"batch_size": 8})  # flagged
vf.RLTrainer("builtin:tiny", "reverse-text", setings=vf.RLConfig())  # flagged
