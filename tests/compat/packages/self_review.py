"""As packages of 0.1.11 to 0.1.14 are written: message objects, own model calls, group rewards,
extras, metrics."""

import verifiers as vf
from verifiers.types import (
    AssistantMessage,
    DatasetBuilder,
    Messages,
    State,
    TrajectoryStep,
    UserMessage,
)


class SelfReviewEnv(vf.MultiTurnEnv):
    """The model writes, reviews its own text in a call that is no turn, and writes again until the
    review is good."""

    async def setup_state(self, state: State) -> None:
        state["reviews"] = []

    async def review(self, state: State, draft: str) -> str:
        prompt = [UserMessage(content=f"Review: {draft}")]
        response = await self.get_model_response(state, prompt, sampling_args={"temperature": 0.0})
        usage = response.usage
        self.increment_state_usage(state, usage.prompt_tokens, usage.completion_tokens)
        return response.message.content

    async def env_response(self, messages: Messages, state: State, **kwargs) -> Messages:
        draft = messages[-1]
        assert draft.role == "assistant"
        assert draft.tool_calls is None
        said = await self.review(state, draft.content)
        state["reviews"].append(said)
        if said == "good":
            state["final_env_response"] = [UserMessage(content="Accepted.")]
            return state["final_env_response"]
        return [UserMessage(content=f"Not yet: {said}")]

    async def add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep):
        trajectory_step["extras"]["length"] = len(trajectory_step["completion"][-1].content)
        await super().add_trajectory_step(state, trajectory_step)

    async def render_completion(self, state: State):
        await super().render_completion(state)
        state["num_messages"] = len(state["completion"])

    @vf.stop(priority=1)
    async def gave_up(self, state: State) -> bool:
        if state["trajectory"]:
            last = state["trajectory"][-1]["completion"][-1]
        else:
            last = AssistantMessage(content="")
        return last.content == "I give up"

    @vf.cleanup
    async def count_reviews(self, state: State):
        state["num_reviews"] = len(state["reviews"])


class ReviewRubric(vf.Rubric):
    def __init__(self):
        super().__init__()
        self.add_reward_func(self.accepted)
        self.add_reward_func(self.shortest, weight=0.5)
        self.add_metric(self.longest_draft)

    async def accepted(self, state: State) -> float:
        return 1.0 if state["stop_condition"] == "has_final_env_response" else 0.0

    def shortest(self, completions: list[Messages], states: list[State]) -> list[float]:
        lengths = [len(state["trajectory"]) for state in states]
        return [float(length == min(lengths)) for length in lengths]

    async def longest_draft(self, state: State) -> int:
        return max(step["extras"]["length"] for step in state["trajectory"])


def build_rows() -> list[dict]:
    return [
        {"prompt": [UserMessage(content="Write about cats")], "info": {"topic": "cats"}},
        {"prompt": [UserMessage(content="Write about fog")], "info": {"topic": "fog"}},
    ]


def load_environment(max_turns: int = 3) -> vf.Environment:
    dataset: DatasetBuilder = build_rows
    return SelfReviewEnv(
        dataset=dataset,
        eval_dataset=dataset,
        rubric=ReviewRubric(),
        max_turns=max_turns,
        timeout_seconds=60,
    )
