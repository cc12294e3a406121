"""``vf-verify``: find out whether a server serves the weights of a folder.

    vf-verify --policy outputs/my-run --endpoint http://127.0.0.1:8000/v1

For any trainer: the server samples answers to fixed prompts, and the model of the folder scores
them in this process.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from verifiers.cli.common.command import Call, SmallCommand
from verifiers.errors import ConfigError, EndpointUnreachable, RunError, VerifiersError
from verifiers.runtime.notations import Variable
from verifiers.runtime.values import Range, option

if TYPE_CHECKING:
    from verifiers.clients.http import OpenAIChatCompletionsClient
    from verifiers_trainer.engines.http.chat import Tokenizer

ABOUT = """Compare a server with a folder of weights: does it serve what you think?

The server samples answers to fixed prompts at two temperatures, and returns their token ids and log-probabilities, as
vLLM and vf-serve do; the folder's model scores them. They may differ by what rounding explains, which is measured.
Conversations, with a system prompt and without, must be the same tokens. Exit code 3: other weights, another precision,
a stale cache, raw log-probabilities, another chat template, or messages that are left out.

\b
  vf-verify --policy outputs/my-run --endpoint http://127.0.0.1:8000/v1
  vf-verify --policy checkpoints/step-40 --endpoint http://gpu:8000/v1 --model policy-v40
"""
NUM_ANSWER = 32
TEMPERATURES = (1.0, 0.7)


@dataclass(frozen=True)
class VerifySettings:
    """The flags of ``vf-verify``."""

    policy: str | None = option(None, "A model, an adapter, or a training run.", metavar="FOLDER")
    endpoint: str | None = option(None, "Root of the OpenAI routes, with /v1.", metavar="URL")
    model: str | None = option(None, "Name in requests [the first served].", metavar="NAME")
    api_key_var: Variable = option("OPENAI_API_KEY", "Environment variable with the key.")
    dtype: str = option(
        "auto", "Precision that the server should have [that of the files].", metavar="NAME"
    )
    max_tokens: Annotated[int, Range(ge=64)] = option(
        184, "Most tokens of a prompt with its answer."
    )


def verify(call: Call, settings: VerifySettings) -> None:
    """Ask, score and say. *Raises* ``RunError`` for a disagreement."""
    if call.words or not (settings.policy and settings.endpoint):
        raise ConfigError("name both sides: vf-verify --policy FOLDER --endpoint URL")
    # late: torch and transformers take seconds to import
    from verifiers.clients.http import OpenAIChatCompletionsClient
    from verifiers.runtime.calls import blocking
    from verifiers_trainer.policy.folder_client import load_folder, model_folder
    from verifiers_trainer.policy.scoring import answers, fixed_prompts
    from verifiers_trainer.run.proof import compare_with
    from verifiers_trainer.settings.sampling import plain

    url, key = settings.endpoint.rstrip("/"), os.environ.get(settings.api_key_var, "EMPTY")
    folder = model_folder(settings.policy)
    client = OpenAIChatCompletionsClient(base_url=url, api_key=key)

    async def names() -> list[str] | None:
        try:
            await client.preflight()  # raises what an unreachable endpoint is to a user
            return await client.list_models()
        finally:
            await client.aclose()

    served = settings.model or next(iter(blocking(names) or ()), None)
    if served is None:
        raise EndpointUnreachable(f"{url} lists no models: give --model", url=url)
    model, tokenizer = load_folder(folder, settings.dtype)
    prompts = fixed_prompts(tokenizer, settings.max_tokens)
    agreement = {}
    for temperature in TEMPERATURES:

        async def work(temperature: float = temperature) -> Any:
            try:
                return await answers(
                    client,
                    served,
                    prompts,
                    version=0,
                    sampling_args=plain(temperature),
                    num_tokens=NUM_ANSWER,
                )
            finally:
                await client.aclose()

        turns = blocking(work)
        try:
            agreement[f"temperature {temperature:g}"] = compare_with(
                model,
                tokenizer,
                turns,
                0,
                temperature=temperature,
                what=f"{served} at {url} does not answer as {folder} does",
            )
        except ConfigError as error:
            if "disagreement" not in error.facts:
                raise
            raise RunError(str(error), **error.facts) from error
    chat = _compare_chat(client, served, tokenizer)
    call.facts |= {
        "policy": str(folder),
        "url": url,
        "model": served,
        "agreement": agreement,
        "chat": chat,
    }
    for name, words in agreement.items():
        call.say(f"{served} is {folder}; {name}: {words}")
    call.say(f"chat: {chat}")


def _compare_chat(client: OpenAIChatCompletionsClient, served: str, tokenizer: Tokenizer) -> str:
    """What became of conversations. *Raises* RunError for other tokens than the tokenizer's."""
    from verifiers.runtime.calls import blocking
    from verifiers.types import ModelRequest
    from verifiers_trainer.engines.rendering import conversations, difference
    from verifiers_trainer.settings.sampling import plain

    if not getattr(tokenizer, "chat_template", None):
        return "not compared, the folder has no chat template"
    compared = conversations(tokenizer)

    async def first_difference() -> str | None:
        try:
            for messages, expected in compared:
                arguments = {**plain(1.0), "max_tokens": 1}
                request = ModelRequest(
                    messages, served, sampling_args=arguments, seed=0, require_tokens=True
                )
                tokens = (await client.complete(request)).tokens
                actual = [] if tokens is None else tokens.prompt_ids.tolist()
                if differs := difference(messages, actual, expected):
                    return differs
        finally:
            await client.aclose()
        return None

    try:
        differs = blocking(first_difference)
    except (
        VerifiersError
    ) as error:  # it has no conversations, or does not say which tokens they are
        return f"not compared: {error}"
    if differs:
        raise RunError(f"{served} at {client.base_url} {differs}")
    return f"{len(compared)} conversations are the same tokens"


COMMAND = SmallCommand(
    name="vf-verify",
    about=ABOUT,
    metavar="",
    options=VerifySettings,
    keys=("policy", "url", "model", "agreement", "chat"),
    action=verify,
)


def main() -> None:
    """The entry point."""
    COMMAND.main()


if __name__ == "__main__":
    sys.exit(COMMAND.run(sys.argv[1:]))
