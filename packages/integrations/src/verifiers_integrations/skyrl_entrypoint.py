"""Commands that train with SkyRL and ``VerifiersGenerator``, and that export the rows of an
environment.

    python -m verifiers_integrations.skyrl_entrypoint export reverse-text data/reverse-text
    python -m verifiers_integrations.skyrl_entrypoint data.train_data=... trainer.policy.model.path=...

With SkyRL's command: ``trainer.override_entrypoint=verifiers_integrations.skyrl_entrypoint``. All
other arguments are settings of SkyRL. Training needs CUDA and was not run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verifiers_integrations import skyrl
from verifiers_integrations.parquet import export_command

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

PROGRAM = "python -m verifiers_integrations.skyrl_entrypoint"


def experiment(cfg: object) -> Any:
    """Return SkyRL's experiment of a configuration, with ``VerifiersGenerator``."""
    base = skyrl.SKYRL.load("train.entrypoints.main_base").BasePPOExp
    name_of = skyrl.SKYRL.load(
        "backends.skyrl_train.inference_servers.utils"
    ).resolve_policy_model_name

    def get_generator(
        self: object, cfg: Any, tokenizer: PreTrainedTokenizerBase, inference_engine_client: Any
    ) -> Any:
        return skyrl.VerifiersGenerator(
            cfg.generator, tokenizer, inference_engine_client, name_of(cfg)
        )

    return type("VerifiersExp", (base,), {"get_generator": get_generator})(cfg)


def run(cfg: object) -> None:
    """Train, on a Ray worker."""
    experiment(cfg).run()


def train(words: Sequence[str]) -> None:
    """Start training as SkyRL does: parse and validate its settings, initialise Ray, train."""
    import ray

    config = skyrl.SKYRL.load("train.config").SkyRLTrainConfig.from_cli_overrides(list(words))
    utils = skyrl.SKYRL.load("train.utils.utils")
    utils.validate_cfg(config)
    utils.initialize_ray(config)
    ray.get(ray.remote(num_cpus=1)(run).remote(config))


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``export ENV OUT_DIR``, or train with settings of SkyRL."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["export"]:
        export_command(f"{PROGRAM} export", "SkyRL", skyrl.export_dataset, words[1:])
    else:
        train([word for word in words if not word.startswith("trainer.override_entrypoint=")])


if __name__ == "__main__":
    main()
