"""The rules of ATIF 1.7, written from its published schema: what a document may hold, and what its
parts refer to."""

import itertools

OPTIONAL = {"extra": dict}
TRAJECTORY = {
    "schema_version": str, "agent": dict, "steps": list, "session_id": str, "trajectory_id": str, "notes": str,
    "final_metrics": dict, "continued_trajectory_ref": str, "subagent_trajectories": list, **OPTIONAL,
}  # fmt: skip
AGENT = {"name": str, "version": str, "model_name": str, "tool_definitions": list, **OPTIONAL}
FINAL = {"total_prompt_tokens": int, "total_completion_tokens": int, **OPTIONAL}
STEP = {
    "step_id": int, "timestamp": str, "source": str, "model_name": str, "reasoning_effort": (str, float),
    "message": (str, list), "reasoning_content": str, "tool_calls": list, "observation": dict, "metrics": dict,
    "is_copied_context": bool, "llm_call_count": int, **OPTIONAL,
}  # fmt: skip
OF_AGENTS = {"model_name", "reasoning_effort", "reasoning_content", "tool_calls", "metrics"}
CALL = {"tool_call_id": str, "function_name": str, "arguments": dict, **OPTIONAL}
RESULT = {"source_call_id": str, "content": (str, list), **OPTIONAL}
METRICS = {
    "prompt_tokens": int, "completion_tokens": int, "prompt_token_ids": list, "completion_token_ids": list,
    "logprobs": list, **OPTIONAL,
}  # fmt: skip


def check(document):
    """*Raises* AssertionError for what the schema does not allow."""
    _fields(document, TRAJECTORY, {"schema_version", "agent", "steps"})
    assert document["schema_version"] == "ATIF-v1.7"
    _fields(document["agent"], AGENT, {"name", "version"})
    _fields(document.get("final_metrics", {}), FINAL)
    assert document["steps"]
    for number, step in enumerate(document["steps"], 1):
        _step(number, step)
    embedded = document.get("subagent_trajectories", [])
    ids = [each["trajectory_id"] for each in embedded]
    assert len(set(ids)) == len(ids)
    for each in embedded:
        check(each)


def _step(number, step):
    _fields(step, STEP, {"step_id", "source", "message"})
    assert step["step_id"] == number
    assert step["source"] in ("system", "user", "agent")
    assert step["source"] == "agent" or OF_AGENTS.isdisjoint(step)
    if step.get("llm_call_count") == 0:
        assert {"metrics", "reasoning_content"}.isdisjoint(step)
    calls, results = step.get("tool_calls", []), step.get("observation", {"results": []})["results"]
    for call in calls:
        _fields(call, CALL, {"tool_call_id", "function_name", "arguments"})
    for result in results:
        _fields(result, RESULT)
        assert result.get("source_call_id") in {None, *(call["tool_call_id"] for call in calls)}
    contents = [step["message"], *(result["content"] for result in results)]
    for part in itertools.chain.from_iterable(c for c in contents if isinstance(c, list)):
        assert part.keys() == {"type", "text" if part["type"] == "text" else "source"}
        assert part["type"] == "text" or part["source"].keys() == {"media_type", "path"}
    metrics = step.get("metrics", {})
    _fields(metrics, METRICS)
    assert all(isinstance(number, float) for number in metrics.get("logprobs", ()))


def _fields(value, allowed, required=frozenset()):
    assert required <= value.keys() <= allowed.keys(), value.keys()
    for name, member in value.items():
        assert isinstance(member, allowed[name]), (name, member)
