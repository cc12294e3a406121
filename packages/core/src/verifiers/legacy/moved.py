"""Aliases for the internal module paths of version 0.2.0.

Importing an old path returns the module with its current contents: ``verifiers.runner is
verifiers.runs.runner``. The finder is called at every import, so it does only one dict lookup.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader, MetaPathFinder
else:  # importlib.abc imports tempfile and shutil, which would be a third of ``import verifiers``
    Loader = MetaPathFinder = object

MOVED: dict[str, str] = {
    "cli.arguments": "cli.evaluate.arguments",
    "cli.checking": "cli.evaluate.checking",
    "cli.command": "cli.common.command",
    "cli.completion": "cli.common.completion",
    "cli.delegate": "cli.common.delegate",
    "cli.display": "cli.evaluate.display",
    "cli.entries": "cli.evaluate.entries",
    "cli.eval": "cli.evaluate.command",
    "cli.exporting": "cli.evaluate.exporting",
    "cli.install.agents": "verifiers_agents.installing",
    "cli.install_sources": "cli.install.sources",
    "cli.installed": "cli.install.installed",
    "cli.installer": "cli.install.installer",
    "cli.interrupt": "cli.common.interrupt",
    "cli.kinds": "cli.common.reader",
    "cli.models": "cli.evaluate.models",
    "cli.options": "cli.evaluate.options",
    "cli.planning": "cli.evaluate.planning",
    "cli.project_files": "cli.install.project_files",
    "cli.repositories": "cli.install.sources",
    "cli.setup": "cli.install.setup",
    "cli.setup_installs": "cli.install.setup",
    "cli.streams": "cli.common.streams",
    "cli.summary": "cli.evaluate.summary",
    "cli.toml_args": "cli.evaluate.toml_args",
    "cli.toml_dump": "cli.evaluate.toml_args",
    "cli.writing": "cli.common.writing",
    "clients.base": "clients.protocol",
    "clients.loops": "runtime.calls",
    "clients.prices": "clients.protocol",
    "context_check": "checks.chat_template",
    "dataset": "data.examples",
    "dataset_arrow": "data.arrow",
    "dataset_sources": "data.sources",
    "deadlines": "runtime.deadlines",
    "decorators": "rollouts.author_code",
    "dual": "runtime.calls",
    "durable": "storage.files",
    "encoding": "runtime.json",
    "environments.agents": "verifiers_agents",
    "environments.agents.agent": "verifiers_agents.agent",
    "environments.agents.conversation": "verifiers_agents.conversation",
    "environments.agents.env": "verifiers_agents.env",
    "environments.agents.gateway": "verifiers_agents.gateway",
    "environments.agents.inside": "verifiers_agents.inside",
    "environments.agents.process": "verifiers_agents.process",
    "environments.agents.programs": "verifiers_agents.programs",
    "environments.agents.turns": "verifiers_agents.turns",
    "environments.closing": "environments.base",
    "environments.harbor": "verifiers_agents.harbor",
    "environments.harbor.building": "verifiers_agents.harbor.building",
    "environments.harbor.dockerfile": "verifiers_agents.harbor.dockerfile",
    "environments.harbor.env": "verifiers_agents.harbor.env",
    "environments.harbor.grading": "verifiers_agents.harbor.grading",
    "environments.harbor.images": "verifiers_agents.harbor.images",
    "environments.harbor.task": "verifiers_agents.harbor.task",
    "environments.running": "environments.base",
    "environments.stopping": "rollouts.loop",
    "example_datasets": "data.example_sets",
    "failpoints": "runtime.failpoints",
    "garbage": "runtime.gc",
    "generate": "runs.entry",
    "historical": "legacy",
    "historical.commands": "legacy.commands",
    "historical.conversations": "legacy.conversations",
    "historical.running": "legacy.running",
    "historical.saving": "legacy.saving",
    "hooks": "rollouts.author_code",
    "integrations": "verifiers_integrations",
    "integrations.harbor": "verifiers_agents.harbor_sandbox",
    "integrations.inspect": "verifiers_integrations.inspect",
    "integrations.inspect_messages": "verifiers_integrations.inspect_messages",
    "integrations.inspect_sandbox": "verifiers_integrations.inspect_sandbox",
    "integrations.inspect_task": "verifiers_integrations.inspect_task",
    "integrations.openenv": "verifiers_integrations.openenv",
    "integrations.trajectories": "verifiers_integrations.trajectories",
    "integrations.zmq_server": "verifiers_integrations.zmq_server",
    "journal": "storage.journal",
    "logs": "runtime.logs",
    "messages": "data.messages",
    "older_modules": "legacy.modules",
    "options": "runs.options",
    "plan": "runs.plan",
    "redaction": "runtime.redaction",
    "registry": "environments.registry",
    "results.metadata": "results.run_metadata",
    "rollout": "rollouts.loop",
    "rollouts.decorators": "rollouts.author_code",
    "rows": "results.rows",
    "rubrics.attributes": "rubrics.rubric",
    "rubrics.calls": "rubrics.scoring",
    "rubrics.functions": "rubrics.arguments",
    "rubrics.isolation": "runtime.processes",
    "rubrics.isolation_worker": "runtime.process_main",
    "rubrics.scores": "rubrics.scoring",
    "rubrics.workers": "runtime.worker_threads",
    "run_client": "clients.resolve",
    "run_description": "runs.run",
    "run_directory": "storage.directory",
    "run_identity": "storage.identity",
    "run_results": "runs.store",
    "runner": "runs.runner",
    "runs.score_after": "runs.runner",
    "runs.single_rollouts": "runs.rollout",
    "runtime.loops": "runtime.calls",
    "runtime.per_loop": "runtime.calls",
    "runtime.sync_async": "runtime.calls",
    "runtime.threads": "runtime.worker_threads",
    "sandbox.attacks": "sandbox.probe.attacks",
    "sandbox.bubblewrap": "sandbox.backends.bubblewrap",
    "sandbox.channel": "sandbox.host.channel",
    "sandbox.container": "verifiers_sandboxes.container",
    "sandbox.engines": "verifiers_sandboxes.engines",
    "sandbox.gvisor": "verifiers_sandboxes.gvisor",
    "sandbox.inside": "sandbox.guest",
    "sandbox.inside.frames": "sandbox.guest.frames",
    "sandbox.inside.interpreter": "sandbox.guest.interpreter",
    "sandbox.inside.keeper": "sandbox.guest.init",
    "sandbox.inside.kernel": "sandbox.guest.kernel",
    "sandbox.inside.launch": "sandbox.guest.launch",
    "sandbox.inside.limits": "sandbox.guest.limits",
    "sandbox.inside.output": "sandbox.guest.output",
    "sandbox.inside.parent": "sandbox.guest.zygote",
    "sandbox.inside.seccomp": "sandbox.guest.seccomp",
    "sandbox.inside.session": "sandbox.guest.session",
    "sandbox.inside.warden": "sandbox.guest.supervisor",
    "sandbox.inside.worker": "sandbox.guest.worker",
    "sandbox.kept": "verifiers_sandboxes.remote_processes",
    "sandbox.mounts": "sandbox.host.mounts",
    "sandbox.nsjail": "verifiers_sandboxes.nsjail",
    "sandbox.packages": "sandbox.host.packages",
    "sandbox.parents": "sandbox.host.zygotes",
    "sandbox.pipe": "verifiers_sandboxes.container",
    "sandbox.remote": "verifiers_sandboxes.remote",
    "sandbox.sandlock": "sandbox.backends.sandlock",
    "sandbox.services": "verifiers_sandboxes.services",
    "sandbox.session": "sandbox.host.session",
    "sandbox.supervised": "sandbox.host.sandlock_supervisor",
    "sandbox.unsafe_subprocess": "sandbox.backends.unsafe_subprocess",
    "single": "runs.rollout",
    "state": "rollouts.state",
    "statistics": "results.statistics",
    "steps": "rollouts.state",
    "suggest": "runtime.suggest",
    "text": "data.text",
    "tool_examples": "data.tool_examples",
    "tools": "data.tool_schema",
    "trajectories": "rollouts.transcript",
    "two_stages": "runs.runner",
    "workers": "runs.workers",
    "workers.__main__": "runs.workers.__main__",
    "workers.channels": "runs.workers.channels",
    "workers.messages": "runs.workers.messages",
    "workers.opening": "runs.workers.opening",
    "workers.packing": "runs.workers.packing",
    "workers.pool": "runs.workers.pool",
    "workers.ray": "runs.workers.ray",
    "workers.serving": "runs.workers.serving",
}
"""Old module path below ``verifiers`` -> current path, below ``verifiers`` or in a package of
another distribution, ``verifiers_NAME``."""


class _Alias(Loader):
    """Loads a module by importing the current module in its place."""

    def __init__(self, new: str):
        self._new = new
        self.old_spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """*Raises* ModuleNotFoundError naming the distribution to install, for a module that moved
        to another distribution."""
        package = self._new.partition(".")[0]
        try:
            module = importlib.import_module(self._new)
        except ModuleNotFoundError as error:
            from verifiers.runtime.distributions import packages
            from verifiers.runtime.install_lines import install_line

            if error.name != package or package not in packages():
                raise
            raise ModuleNotFoundError(
                f"{spec.name} is now {self._new}, in a package that is not installed; "
                f"install with: {install_line(packages()[package])}",
                name=spec.name,
            ) from error
        self._spec = module.__spec__
        return module

    def get_code(self, fullname: str) -> CodeType | None:
        """For ``python -m`` with an old path."""
        from importlib.abc import InspectLoader
        from importlib.util import find_spec

        spec = find_spec(self._new)
        if spec is None or not isinstance(spec.loader, InspectLoader):
            return None
        if self.old_spec is not None:
            self.old_spec.origin = spec.origin  # ``sys.argv[0]`` of the program
        return spec.loader.get_code(self._new)

    def exec_module(self, module: ModuleType) -> None:
        # the import system has replaced it with the spec of the old name
        module.__spec__ = self._spec


class _MovedModules(MetaPathFinder):
    """Finds registered old paths."""

    def __init__(self) -> None:
        self.paths: dict[str, str] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        new = self.paths.get(fullname)
        if new is None:
            return None
        runs = f"{fullname}.__main__" in self.paths  # ``python -m`` looks for it in packages only
        alias = _Alias(new)
        alias.old_spec = ModuleSpec(fullname, alias, is_package=runs)
        return alias.old_spec


_FINDER = _MovedModules()


def register(package: str, moved: dict[str, str]) -> None:
    """Make the modules of ``package`` importable by their old paths, the keys of ``moved``."""
    for old, new in moved.items():
        is_whole = new.partition(".")[0].partition("_")[0] == "verifiers"
        _FINDER.paths[f"{package}.{old}"] = new if is_whole else f"{package}.{new}"
    if _FINDER not in sys.meta_path:  # first, because a folder of the same name may exist
        sys.meta_path.insert(0, _FINDER)
