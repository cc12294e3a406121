"""Several tasks as packages of 0.1.8 group them: each member with its own parser, rubric and system
prompt."""

from datasets import Dataset

import verifiers as vf
from verifiers.envs.env_group import EnvGroup


def load_upper():
    dataset = Dataset.from_dict({"question": ["abc", "De"], "answer": ["ABC", "DE"]})

    def is_upper(completion, answer, **kwargs):
        return float(completion[-1]["content"] == answer)

    return vf.SingleTurnEnv(
        dataset=dataset,
        system_prompt="Write it in capitals.",
        rubric=vf.Rubric(funcs=[is_upper], weights=[2.0]),
    )


def load_count():
    dataset = Dataset.from_dict(
        {"question": ["abc"], "answer": ["3"], "task": ["letters"], "info": [{"kind": "len"}]}
    )
    parser = vf.XMLParser(["n"], answer_field="n")

    def is_count(parser, completion, answer, task, info, **kwargs):
        assert info["kind"] == "len"
        return float(parser.parse_answer(completion) == answer)

    return vf.SingleTurnEnv(
        dataset=dataset,
        system_prompt="Count the letters. Answer in <n></n>.",
        parser=parser,
        rubric=vf.Rubric(
            funcs=[is_count, parser.get_format_reward_func()], weights=[1.0, 0.0], parser=parser
        ),
    )


def load_environment(**kwargs):
    return EnvGroup(envs=[load_upper(), load_count()], env_names=["upper", "count"], **kwargs)
