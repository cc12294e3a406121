"""Single-turn mathematics as packages of 0.1.8 are written: an example dataset, a think parser, a
boxed answer."""

import verifiers as vf
from verifiers.parsers.think_parser import ThinkParser
from verifiers.utils.data_utils import (
    THINK_BOXED_SYSTEM_PROMPT,
    extract_boxed_answer,
    load_example_dataset,
)


def load_environment(
    num_train_examples: int = -1,
    num_eval_examples: int = -1,
    system_prompt: str = THINK_BOXED_SYSTEM_PROMPT,
):
    dataset = load_example_dataset("arithmetic", split="train").shuffle(seed=777)
    if num_train_examples != -1:
        dataset = dataset.select(range(num_train_examples))
    eval_dataset = load_example_dataset("arithmetic", split="test")
    if num_eval_examples != -1:
        eval_dataset = eval_dataset.select(range(num_eval_examples))
    parser = ThinkParser(extract_fn=extract_boxed_answer)

    def correct_answer_reward_func(parser, completion, answer, **kwargs):
        response = parser.parse_answer(completion) or ""
        return 1.0 if response == answer else 0.0

    def num_words(completion, **kwargs):
        return len(completion[-1]["content"].split())

    rubric = vf.Rubric(
        funcs=[correct_answer_reward_func, parser.get_format_reward_func(), num_words],
        weights=[1.0, 0.5, 0.0],
        parser=parser,
    )
    return vf.SingleTurnEnv(
        dataset=dataset,
        eval_dataset=eval_dataset,
        system_prompt=system_prompt,
        parser=parser,
        rubric=rubric,
    )
