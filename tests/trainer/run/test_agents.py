"""Training through an agent program: real processes in a sandbox, sampled tokens as they were
sampled."""

import pytest

import verifiers as vf
from support.agents import CLIENT
from support.isolated import needs_sandbox
from support.training import run, small_trainer, toy_env

TALKER = (
    CLIENT
    + """
messages = [user(sys.argv[1])]
chat([user("A title?")], temperature=0.3)  # a call beside the conversation, with other sampling arguments
for _ in range(2):
    answer = chat(messages, tools=[{"type": "function", "function": {"name": "f", "parameters": {}}}], top_p=0.5)
    messages += [{"role": "assistant", "content": [{"type": "text", "text": answer["content"]}]}, user("Go on.")]
open("answer.txt", "w").write(answer["content"])
"""
)


def talker(**parameters):
    needs_sandbox()
    return vf.AgentEnv(
        command=["python3", "agent.py", "{prompt}"],
        files={"agent.py": TALKER},
        dataset=[{"question": "hm"}] * 4,
        rubric=vf.Rubric(
            funcs=[lambda state: float(sum(map(ord, state["files"].get("answer.txt", ""))) % 7)]
        ),
        collect=["answer.txt"],
        tools=[],
        **parameters,
    )


def test_two_steps_through_an_agent_have_no_fork_and_equal_probabilities(tmp_path):
    trainer = small_trainer(
        tmp_path, talker(), max_seq_len=128, zero_variance="keep", max_off_policy_steps=0
    )
    metrics = run(trainer).steps
    assert trainer.args.history == "exact"
    assert len(metrics) == 2
    for step in metrics:
        assert step["rollouts/errors"] == 0
        assert step["samples/forks_per_rollout"] == 0
        assert step["sampler/log_ratio_abs"] < 1e-6


def test_negative_control_side_calls_would_be_samples_of_their_own(tmp_path):
    env = talker(trained_roles=["main", "side"])
    trainer = small_trainer(tmp_path, env, max_seq_len=128, zero_variance="keep", max_steps=1)
    (step,) = run(trainer).steps
    assert step["samples/forks_per_rollout"] == 1


def silent(**parameters):
    """An environment of an agent that is never started."""
    return vf.AgentEnv(
        command=["x"], dataset=[{"question": "?"}], rubric=toy_env().rubric, **parameters
    )


@pytest.mark.parametrize(
    ("env", "settings", "expected"),
    [
        (silent, {}, "exact"),
        (silent, {"history": "template"}, "template"),
        (lambda: silent(history="template"), {}, "template"),
        (lambda: vf.EnvGroup([toy_env(), silent()]), {}, "exact"),
        (toy_env, {}, "template"),
    ],
)
def test_an_agents_history_is_exact_unless_a_setting_says_otherwise(
    tmp_path, env, settings, expected
):
    assert small_trainer(tmp_path, env(), **settings).args.history == expected
