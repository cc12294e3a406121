"""The error tree: who may stop what, facts as attributes, pickling."""

import inspect
import pickle

import pytest

import verifiers as vf
from verifiers import errors

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.VerifiersError) and cls.__module__ == errors.__name__
]
RETRYABLE = "RateLimited ModelUnavailable MalformedResponse EmptyModelResponseError InfraError TunnelError".split()
SCORABLE = (
    "OverlongPromptError ToolError ToolParseError ToolCallError AgentFailure SandboxLimit".split()
)


def test_every_error_says_whose_failure_it_is():
    for cls in ALL:
        branches = [b for b in (vf.UsageError, vf.RolloutError, vf.RunError) if issubclass(cls, b)]
        assert len(branches) == (cls is not vf.VerifiersError), cls
        assert cls.__doc__


def test_exit_codes():
    assert {cls.exit_code for cls in ALL if issubclass(cls, vf.UsageError)} == {2}
    naming = (vf.AuthenticationFailed, vf.ModelNotFound, vf.EndpointUnreachable)
    for cls in ALL:
        if issubclass(cls, vf.RunError):
            assert cls.exit_code == (2 if issubclass(cls, naming) else 3)


def test_retryable_and_scorable_are_as_documented():
    assert sorted(cls.__name__ for cls in ALL if cls.retryable) == sorted(
        [*RETRYABLE, "SandboxUnavailable"]
    )
    assert sorted(cls.__name__ for cls in ALL if cls.scorable) == sorted(SCORABLE)


def test_standard_bases_are_kept_for_callers_that_catch_those():
    assert issubclass(vf.ConfigError, ValueError)
    assert issubclass(vf.DatasetError, ValueError)
    assert issubclass(vf.UnknownEnvironment, (ValueError, LookupError))
    assert issubclass(vf.EnvironmentLoadError, RuntimeError)
    assert vf.Error is vf.RolloutError
    assert vf.InvalidModelResponseError is vf.MalformedResponse


def test_facts_read_as_attributes_and_absent_ones_as_none():
    error = vf.RateLimited("slow down", retry_after_s=4.0)
    assert (error.retry_after_s, error.url, str(error)) == (4.0, None, "slow down")
    with pytest.raises(AttributeError, match="colour"):
        error.colour
    with pytest.raises(TypeError, match="colour"):
        vf.RateLimited("x", colour="red")


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls):
    again = pickle.loads(pickle.dumps(cls("text", hook="h")))
    assert (type(again), str(again), again.hook) == (cls, "text", "h")


def test_an_authors_subclass_says_for_itself():
    class Flaky(vf.ToolError):
        retryable = True

    assert Flaky("x").scorable
    assert Flaky("x").retryable
