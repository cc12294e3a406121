"""A judged answer as packages of 0.1.8 to 0.1.10 are written: an own client, an own prompt, a sum
over both."""

import os

from openai import AsyncOpenAI

import verifiers as vf

JUDGE_PROMPT = """Question: {question}
Expected: {answer}
Given: {response}
Say "yes" or "no"."""


def load_environment(
    judge_model: str = "judge",
    judge_base_url: str = "https://api.openai.com/v1",
    judge_api_key_var: str = "JUDGE_API_KEY",
    num_examples: int = -1,
):
    rows = [
        {"question": "Which planet is red?", "answer": "Mars"},
        {"question": "How many moons has {Earth}?", "answer": "one"},
        {"question": "Is the sun a star?", "answer": "yes"},
    ]
    parser = vf.MaybeThinkParser()
    judge_client = AsyncOpenAI(
        base_url=judge_base_url, api_key=os.getenv(judge_api_key_var, "EMPTY")
    )
    rubric = vf.JudgeRubric(
        parser=parser,
        judge_client=judge_client,
        judge_model=judge_model,
        judge_prompt=JUDGE_PROMPT,
        judge_sampling_args={"temperature": 0.0},
    )

    async def judge_reward(judge, prompt, completion, answer, state, **kwargs):
        said = await judge(prompt, completion, answer, state)
        return 1.0 if "yes" in said.lower() else 0.0

    async def brevity(parser, completion, **kwargs):
        return 1.0 if len(parser.parse_answer(completion)) < 20 else 0.0

    rubric.add_reward_func(judge_reward, weight=1.0)
    rubric.add_reward_func(brevity, weight=0.5)
    return vf.SingleTurnEnv(
        dataset=rows if num_examples < 0 else rows[:num_examples], parser=parser, rubric=rubric
    )
