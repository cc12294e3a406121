"""Few-shot examples and tags as packages of 0.1.2 to 0.1.8 are written: alternatives, format text,
``info`` columns."""

import json

from datasets import Dataset

import verifiers as vf
from verifiers.parsers.xml_parser import XMLParser
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Info, Messages


def load_environment(use_json_info: bool = False, **kwargs):
    parser = XMLParser(
        ["reasoning", ("verdict", "answer")], answer_field="verdict", extract_fn=str.lower
    )
    system_prompt = f"Say whether it is prime. Respond in this format:\n{parser.get_format_str()}"
    few_shot = [
        {"role": "user", "content": "9"},
        {"role": "assistant", "content": parser.format(reasoning="3 * 3", verdict="no")},
    ]
    infos = [{"kind": "small", "factor": 2}, {"kind": "small"}, {"kind": "large", "factor": 7}]
    dataset = Dataset.from_dict(
        {
            "number": ["4", "5", "91"],
            "label": ["no", "yes", "no"],
            "info": [json.dumps(info) for info in infos] if use_json_info else infos,
        }
    )

    def right(completion: Messages, answer: str, parser: XMLParser) -> bool:
        return parser.parse_answer(completion) == answer

    def names_a_factor(completion: Messages, info: Info) -> float:
        parsed = parser.parse(completion[-1]["content"])
        return float("factor" in info and str(info["factor"]) in (parsed.reasoning or ""))

    rubric = Rubric(
        funcs=[right, names_a_factor, parser.get_format_reward_func()],
        weights=[1.0, 0.5, 0.2],
        parser=parser,
    )
    return vf.SingleTurnEnv(
        dataset=dataset,
        question_key="number",
        answer_key="label",
        system_prompt=system_prompt,
        few_shot=few_shot,
        parser=parser,
        rubric=rubric,
        **kwargs,
    )
